"""Flags of the decoder: kernels, attention variants, MLA, multi-token prediction, other model families."""

from megatron.core.configs.list_expression import int_or_list
from megatron.training.flag_table.rows import ValueRow, negative, no_effect, not_yet, refused, switch, value, words

FEATURES = (
    no_effect(
        "old spellings",
        "this tree has one model implementation",
        switch("--use-mcore-models"),
        switch("--use-flash-attn"),
        switch("--enable-experimental"),
        value("--local-rank", int, 0),
    ),
    no_effect(
        "choice of fused kernels",
        "the same maths runs in the form that fits the device",
        negative("--no-bias-dropout-fusion", "bias_dropout_fusion"),
        negative("--no-masked-softmax-fusion", "masked_softmax_fusion"),
        switch("--no-persist-layer-norm"),
    ),
    refused(
        "the cross entropy of Transformer Engine",
        "drop the flag: --cross-entropy-loss-fusion runs kernels of this tree",
        value("--cross-entropy-fusion-impl", str, "native", "native|te"),
    ),
    not_yet(
        "custom layer specs from the command line",
        "build the spec in a model provider of your own and drop the flag",
        words("--spec", str),
    ),
    not_yet(
        "sliding window attention",
        "drop the flag",
        value("--window-size", str),
        value("--window-attn-skip-freq", int_or_list),
        value("--softmax-type", str, "vanilla", "vanilla|off-by-one|learnable"),
    ),
    not_yet(
        "multi-latent attention",
        "use multi-head or group-query attention",
        switch("--multi-latent-attention"),
        value("--q-lora-rank", int),
        value("--kv-lora-rank", int, 32),
        value("--qk-head-dim", int, 128),
        value("--qk-pos-emb-head-dim", int, 64),
        value("--v-head-dim", int, 128),
        switch("--mla-down-proj-fusion"),
    ),
    not_yet(
        "YaRN",
        "use --position-embedding-type rope, with --use-rope-scaling for long contexts",
        value("--rope-type", str, None, "rope|yarn"),
        value("--rotary-scaling-factor", float, 1.0),
        value("--mscale", float, 1.0),
        value("--mscale-all-dim", float, 0.0),
        value("--yarn-original-max-position-embeddings", int),
        value("--yarn-beta-fast", float),
        value("--yarn-beta-slow", float),
    ),
    not_yet(
        "multi-token prediction",
        "drop the flag",
        value("--mtp-num-layers", int),
        value("--mtp-loss-scaling-factor", float, 0.1),
        switch("--mtp-standalone"),
    ),
    refused(
        "hybrid and linear attention models",
        "this tree trains decoder transformers; drop the flag",
        value("--hybrid-override-pattern --hybrid-layer-pattern", str),
        switch("--is-hybrid-model"),
        value("--mamba-head-dim", int),
        value("--mamba-num-groups", int),
        value("--mamba-num-heads", int),
        value("--mamba-state-dim", int),
        value("--linear-attention-freq", int_or_list),
        value("--linear-conv-kernel-dim", int),
        value("--linear-key-head-dim", int),
        value("--linear-num-key-heads", int),
        value("--linear-num-value-heads", int),
        value("--linear-value-head-dim", int),
        switch("--attention-output-gate"),
    ),
    refused(
        "vision and encoder-decoder models",
        "this tree trains text decoders; drop the flag",
        words("--mrope-section", int),
        value("--img-h", int),
        value("--img-w", int),
        value("--patch-dim", int),
        value("--decoder-seq-length", int),
        value("--vocab-extra-ids", int, 0),
    ),
)

VALUES = (
    ValueRow(
        "position_embedding_type",
        ("yarn",),
        "not_yet",
        "YaRN",
        "use --position-embedding-type rope",
    ),
    ValueRow(
        "position_embedding_type",
        ("mrope", "relative"),
        "refused",
        "vision and encoder-decoder models",
        "use --position-embedding-type rope",
    ),
    ValueRow(
        "transformer_impl",
        ("inference_optimized",),
        "refused",
        "inference",
        "use --transformer-impl local",
    ),
)
