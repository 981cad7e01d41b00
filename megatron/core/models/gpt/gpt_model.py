"""GPT: embedding, decoder, output layer, loss per token.

    tokens [b, s] -> embedding -> decoder layers -> final norm -> output layer -> logits [s, b, v] -> losses [b, s]
                     pre_process                    post_process

Legend: b batch, s sequence, h width, v rows of the vocabulary (padding included).
"""

import torch

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.fusions.fused_rope import RotaryTables
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
    PositionEmbeddingType,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module import LanguageModule
from megatron.core.module_api.parameter import hidden_init
from megatron.core.module_api.spec_utils import ModuleSpec
from megatron.core.param_attrs import has_param_attrs, mark_real_rows, mark_shared_embedding, param_attrs
from megatron.core.pipeline_parallel.overlap.protocol import LayerCall, ModelStages
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.utils.groups import group_size

_POSITION_TYPES = ("learned_absolute", "rope", "none")


class GPTModel(LanguageModule):
    """Decoder-only language model.

    Args:
        transformer_layer_spec: Specs of all layers, or of one that is repeated.
        vocab_size: Rows of the vocabulary, padding included.
        max_sequence_length: Longest sequence, the size of a learned position table.
        pre_process: This chunk begins with the embedding.
        post_process: This chunk ends with the output layer.
        fp16_lm_cross_entropy: Compute the loss in half precision.
        parallel_output: Leave logits split over tensor-parallel ranks.
        share_embeddings_and_output_weights: The output layer uses the word embedding's matrix.
        position_embedding_type: Learned table, rotary, or none.
        rotary_percent, rotary_base, rope_scaling, rope_scaling_factor, seq_len_interpolation_factor: See
            `RotaryEmbedding`.
        true_vocab_size: Rows that are tokens; the others are left out of the loss. By default all of them.
        vp_stage: Number of this chunk on a pipeline rank that holds several.

    Raises: ConfigError for a position embedding that does not exist here, or a vocabulary larger than its table.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules | ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        true_vocab_size: int | None = None,
        vp_stage: int | None = None,
    ) -> None:
        true_size = vocab_size if true_vocab_size is None else true_vocab_size
        _check_arguments(position_embedding_type, vocab_size, true_size)
        super().__init__(config, true_size, fp16_lm_cross_entropy, pg_collection)
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size, max_sequence_length, position_embedding_type, tp_group=self.pg_collection.tp
            )
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if position_embedding_type == "rope":
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels,
                rotary_percent,
                rotary_interleaved=config.rotary_interleaved,
                seq_len_interpolation_factor=seq_len_interpolation_factor,
                rotary_base=rotary_base,
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
            )
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        if post_process:
            self.output_layer = self._build_output_layer(vocab_size, parallel_output)
        self._mark_filler_rows()
        self._mark_shared_embedding()

    def _build_output_layer(self, vocab_size: int, parallel_output: bool) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            self.config.hidden_size,
            vocab_size,
            config=self.config,
            init_method=hidden_init(self.config),
            bias=False,
            gather_output=not parallel_output,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            is_embedding_or_output=True,
            tp_group=self.pg_collection.tp,
        )

    def _mark_filler_rows(self) -> None:
        """A checkpoint may be padded to another size of vocabulary."""
        for param in self.parameters():
            if has_param_attrs(param) and param_attrs(param).is_embedding_or_output:
                mark_real_rows(param, self.true_vocab_size)

    def _mark_shared_embedding(self) -> None:
        """On several stages the shared matrix exists twice."""
        shared = self.shared_embedding_or_output_weight() if self.pre_process or self.post_process else None
        if shared is not None and self.pre_process != self.post_process:
            mark_shared_embedding(shared, is_copy=self.post_process)

    def global_name(self, local_name: str) -> str:
        """Name the last stage's copy of the shared matrix as the first one's: same weights, same checkpoint key."""
        is_copy = self.share_embeddings_and_output_weights and not self.pre_process
        return "embedding.word_embeddings.weight" if is_copy and local_name == "output_layer.weight" else local_name

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor | None] | None) -> None:
        """Provide the hidden states [s, b, h] that a chunk without embedding starts from; a list holds one entry."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """Return the matrix [v, h] that embedding and output layer share, None if they do not."""
        if not self.share_embeddings_and_output_weights:
            return None
        return self.embedding.word_embeddings.weight if self.pre_process else self.output_layer.weight

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        loss_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return losses with labels, logits without, hidden states from a chunk that does not end the model.

        `loss_mask` [b, s] is part of the call that users know; losses are returned unmasked, the loss function of the
        training loop applies the mask.

        Shapes: input_ids, position_ids, labels int64 [b, s]; attention_mask bool broadcastable to [b, 1, s, s],
            True = masked; decoder_input [s, b, h] (sequence parallel: a shard of s) in place of the embedding;
            padding_mask bool [b, s], True = padding
            -> losses fp32 [b, s], or logits [b, s, v] (with `parallel_output` this rank's columns), or hidden states
            [s, b, h].
        """
        del loss_mask
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids, position_ids)
        hidden_states = self.decoder(decoder_input, attention_mask, self._rotary_tables(decoder_input), padding_mask)
        return self._output(hidden_states, labels) if self.post_process else hidden_states

    @property
    def _is_tied_here(self) -> bool:
        """True if embedding and output layer of this very chunk share their matrix."""
        return self.share_embeddings_and_output_weights and self.pre_process and self.post_process

    def build_schedule_plan(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        loss_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> ModelStages:
        """Cut the forward pass with these arguments into stages; same shapes as `forward`, nothing is computed yet."""
        del loss_mask

        def embed() -> torch.Tensor:
            return self.embedding(input_ids, position_ids) if decoder_input is None else decoder_input

        def layer_call(hidden_states: torch.Tensor) -> LayerCall:
            return LayerCall(attention_mask, self._rotary_tables(hidden_states), padding_mask)

        def finish(hidden_states: torch.Tensor) -> torch.Tensor:
            hidden_states = self.decoder.final_norm(hidden_states)
            return self._output(hidden_states, labels) if self.post_process else hidden_states

        return ModelStages(
            embed if self.pre_process else None,
            list(self.decoder.layers),  # type: ignore[arg-type]
            layer_call,
            finish,
            self.decoder.recomputed_layers(),
            self.embedding.word_embeddings.weight if self._is_tied_here else None,
        )

    def _rotary_tables(self, decoder_input: torch.Tensor | None) -> RotaryTables | None:
        """Return the tables for the length of the input [s, b, h], or of the tensor that was set instead."""
        if self.rotary_pos_emb is None:
            return None
        hidden_states = self.decoder.input_tensor if decoder_input is None else decoder_input
        assert hidden_states is not None, "decoder_input=None: a chunk without embedding needs set_input_tensor first"
        shards = group_size(self.pg_collection.tp) if self.config.sequence_parallel else 1
        # a sequence shard of a context-parallel part -> the whole sequence
        length = hidden_states.shape[0] * shards * group_size(self.pg_collection.cp)
        dtype, device = self.config.params_dtype, hidden_states.device
        return self.rotary_pos_emb.get_tables(length, dtype, device, self.pg_collection.cp)

    def _output(self, hidden_states: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """Project and score: hidden_states [s, b, h], labels [b, s] -> losses [b, s], or logits [b, s, v]."""
        logits, _ = self.output_layer(hidden_states, weight=self.shared_embedding_or_output_weight())
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)


def _check_arguments(position_embedding_type: str, vocab_size: int, true_vocab_size: int) -> None:
    if position_embedding_type not in _POSITION_TYPES:
        raise ConfigError(
            f"position_embedding_type={position_embedding_type!r}: this model has {', '.join(_POSITION_TYPES)}; "
            "choose one of them with --position-embedding-type."
        )
    if true_vocab_size > vocab_size:
        raise ConfigError(
            f"padded_vocab_size={vocab_size} with a vocabulary of {true_vocab_size}: every token needs a row; "
            f"set --padded-vocab-size to at least {true_vocab_size}, or drop it."
        )
