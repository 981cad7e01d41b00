"""Flags of precision and memory: FP8, optimizer state dtypes, recompute, graphs, offload."""

from megatron.training.flag_table.rows import ValueRow, negative, no_effect, not_yet, refused, switch, value, words

OFFLOAD_MODULES = "attn_norm|qkv_linear|core_attn|attn_proj|mlp_norm|expert_fc1|moe_act|fused_group_mlp"

FEATURES = (
    refused(
        "parameters gathered in MXFP8, which needs Blackwell",
        "use --fp8-param-gather with --fp8-recipe blockwise",
        switch("--reuse-grad-buf-for-mxfp8-param-ag"),
    ),
    no_effect(
        "router padding for FP8",
        "the rows of each expert are padded where they are sorted",
        switch("--moe-router-padding-for-quantization"),
    ),
    not_yet(
        "main weights in other dtypes",
        "drop the flag: main weights are fp32",
        value("--main-params-dtype", str, "fp32", "fp32|fp16"),
    ),
    refused(
        "CUDA graphs of single layers",
        "drop the flag, and use --cuda-graph-impl full_iteration to capture the whole step",
        words("--cuda-graph-modules", str, [], "attn|mlp|moe|moe_router|moe_preprocess|mamba"),
    ),
    no_effect(
        "settings of CUDA graphs",
        "a captured step has its optimizer inside, and random states are graph-safe as they are",
        switch("--optimizer-cuda-graph"),
        switch("--te-rng-tracker"),
    ),
    refused(
        "offload to the host",
        "drop the flag, and spread experts with --expert-model-parallel-size if memory is short",
        value("--cpu-offloading-num-layers", int, 0),
        switch("--optimizer-cpu-offload"),
        value("--optimizer-offload-fraction", float, 1.0),
        switch("--fine-grained-activation-offloading"),
        words("--offload-modules", str, None, OFFLOAD_MODULES),
        negative("--no-pin-cpu-grads", "pin_cpu_grads"),
        negative("--no-pin-cpu-params", "pin_cpu_params"),
    ),
)

VALUES = (
    ValueRow(
        "recompute_modules",
        ("mla_up_proj",),
        "not_yet",
        "recompute of a part of multi-latent attention",
        "take mla_up_proj out of --recompute-modules",
    ),
    ValueRow(
        "recompute_modules",
        ("gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"),
        "refused",
        "recompute of parts of other architectures",
        "use --recompute-modules core_attn",
    ),
    ValueRow(
        "fp8_recipe",
        ("mxfp8",),
        "refused",
        "1 x 32 scales, which only Blackwell's tensor cores read",
        "use --fp8-recipe blockwise",
    ),
    ValueRow("fp8_recipe", ("custom",), "refused", "FP8 recipes from user code", "use --fp8-recipe tensorwise"),
    ValueRow("exp_avg_dtype", ("fp16", "fp8"), "not_yet", "scaled moments", "use --exp-avg-dtype bf16"),
    ValueRow("exp_avg_sq_dtype", ("fp16", "fp8"), "not_yet", "scaled moments", "use --exp-avg-sq-dtype bf16"),
)
