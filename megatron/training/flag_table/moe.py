"""Flags of mixture-of-experts layers: kernels, the flex dispatcher, overlap, device-side budgets."""

from megatron.training.flag_table.rows import ValueRow, no_effect, not_yet, switch, value

FEATURES = (
    not_yet(
        "shared experts beside the dispatch",
        "drop the flag: shared experts run in line",
        switch("--moe-shared-expert-overlap"),
    ),
    not_yet(
        "narrow floats on the wire of the flex dispatcher in backward",
        "drop the flag: gradients travel in the dtype of the hidden states",
        value("--moe-combine-bwd-dtype", str, "bf16", "bf16|mxfp8"),
    ),
    no_effect(
        "details of HybridEP kernels",
        "rows are always ordered on arrival, by as many blocks as there are rows, and ranks may bring unequal counts",
        switch("--moe-permute-fusion-into-hybridep"),
        value("--moe-hybridep-num-blocks-permute", int),
        value("--moe-hybridep-num-blocks-unpermute", int),
        switch("--moe-hybridep-pad-uneven-dispatch-inputs"),
    ),
    not_yet(
        "overlap of expert communication",
        "drop the flag",
        switch("--overlap-dispatch-backward-with-experts-wgrad"),
    ),
    not_yet(
        "paged buffers for expert activations",
        "drop the flag, and lower --moe-expert-rank-capacity-factor if memory is short",
        switch("--moe-paged-stash"),
        value("--moe-paged-stash-page-size", int, 64),
        value("--moe-paged-stash-buffer-size-factor-cuda", float, 1.1),
        value("--moe-paged-stash-buffer-size-factor-cpu", float, 0.0),
    ),
    not_yet(
        "expert layers of Transformer Engine",
        "drop the flag: --moe-grouped-gemm uses torch's grouped GEMM",
        switch("--use-transformer-engine-op-fuser"),
        switch("--moe-use-grouped-tensor"),
    ),
)

VALUES = (
    ValueRow(
        "moe_dispatch_fwd_dtype",
        ("mxfp8",),
        "refused",
        "1 x 32 scales, which only Blackwell's tensor cores read",
        "use --moe-dispatch-fwd-dtype fp8",
    ),
    ValueRow(
        "moe_flex_dispatcher_backend",
        ("ncclep",),
        "refused",
        "the NCCL EP backend",
        "use --moe-flex-dispatcher-backend hybridep",
    ),
    ValueRow(
        "moe_router_load_balancing_type",
        ("quantile_balancing",),
        "not_yet",
        "quantile balancing",
        "use --moe-router-load-balancing-type aux_loss",
    ),
)
