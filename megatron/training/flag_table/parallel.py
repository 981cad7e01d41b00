"""Flags of parallelism: pipelines, communication, the sharded optimizer."""

from megatron.training.flag_table.rows import ValueRow, negative, no_effect, not_yet, refused, switch, value

FEATURES = (
    no_effect(
        "overlap of messages between pipeline stages in warm-up and flush",
        "they overlap there as everywhere else",
        switch("--overlap-p2p-communication-warmup-flush", dest="overlap_p2p_comm_warmup_flush"),
    ),
    no_effect(
        "alignment of pipeline stages",
        "every stage starts reducing and gathering as soon as it can",
        negative("--no-align-param-gather", "align_param_gather"),
        negative("--no-align-grad-reduce --disable-align-grad-reduce", "align_grad_reduce"),
    ),
    not_yet(
        "overlap of tensor-parallel communication",
        "drop the flag",
        switch("--tp-comm-overlap"),
        negative("--no-tp-comm-bulk-dgrad", "tp_comm_bulk_dgrad"),
        negative("--no-tp-comm-bulk-wgrad", "tp_comm_bulk_wgrad"),
    ),
    not_yet(
        "NCCL settings per group",
        "set NCCL's environment variables and drop the flag",
        value("--nccl-communicator-config-path", str),
    ),
    not_yet(
        "replicas of the distributed optimizer",
        "drop the flag: states are sharded over all data parallel ranks",
        value("--num-distributed-optimizer-instances", int, 1),
    ),
    no_effect(
        "fused division of gradients and barriers of timers",
        "gradients are scaled once, before their reduction; timers have no barrier",
        negative("--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion"),
        negative("--no-barrier-with-level-1-timing", "barrier_with_L1_time"),
    ),
    refused(
        "Megatron-FSDP",
        "use data parallelism and drop the flag",
        switch("--use-megatron-fsdp"),
        value("--data-parallel-sharding-strategy", str, "no_shard", "no_shard|optim|optim_grads|optim_grads_params"),
        value("--outer-dp-sharding-strategy", str, "no_shard", "no_shard|optim"),
        value("--megatron-fsdp-main-params-dtype", str),
        value("--megatron-fsdp-main-grads-dtype", str),
        value("--megatron-fsdp-grad-comm-dtype", str),
        switch("--keep-fp8-transpose-cache"),
    ),
    refused(
        "the Muon family of optimizers",
        "use --optimizer adam and drop the flag",
        value("--muon-momentum", float, 0.9),
        value("--muon-scale-mode", str, "spectral", "spectral|unit_rms_norm|shape_scaling"),
        value("--muon-extra-scale-factor", float, 1.0),
        negative("--no-use-layer-wise-param-layout", "use_layer_wise_param_layout"),
    ),
    not_yet(
        "runs without a cluster (fake process group)",
        "drop the flag: without torchrun a single process needs no launcher",
        switch("--fake-process-group"),
    ),
)

VALUES = (
    ValueRow(
        "optimizer",
        ("muon", "dist_muon", "adaptive_muon"),
        "refused",
        "the Muon family of optimizers",
        "use --optimizer adam",
    ),
    ValueRow("optimizer", ("lion", "soap"), "refused", "the optimizers Lion and SOAP", "use --optimizer adam"),
)
