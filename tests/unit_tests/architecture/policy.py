"""The tables behind the gates: layers, allow-lists, registries.

A gate that makes code worse is changed here, in the open.

A unit of a layer is a group of modules that may import each other (without a cycle); units of one layer never do.
"""

# The lowest layer first. Names are relative to `megatron.`; a package stands for everything in it.
LAYERS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        (
            "core.utils",
            "core.optional_deps",
            "core.env",
            "core.errors",
            "core.enums",
            "core.param_attrs",
            "core.deferred_wgrad",
            "core.rank_generator",
            "core.pipeline_layout",
            "core.graph_state",
            "core.streams",
            "core.step_guard",
            "core.aux_loss_scale",
            "core.timers",
        ),
    ),
    (
        ("core.configs", "core.model_parallel_config"),
        ("core.parallel_state", "core.process_groups_config"),
        ("core.num_microbatches_calculator",),
        ("core.fusions",),
        ("core.stream_check",),
    ),
    (("core.fp8",), ("core.datasets",), ("core.tokenizers",)),
    (("core.dist_checkpointing",),),
    (("core.tensor_parallel", "core.module_api"), ("core.distributed",)),
    (("core.pipeline_parallel",), ("core.optimizer",), ("core.extensions",), ("core.full_iteration_graph",)),
    (("core.transformer",),),
    (("core.models",),),
    (("training",),),
)

# Two views of one thing may know each other; every other cycle fails.
TWINS: tuple[frozenset[str], ...] = (
    frozenset({"megatron.core.parallel_state", "megatron.core.process_groups_config"}),
)

# Modules that may hold one process-wide object, with a `reset()`.
GLOBAL_MODULES = frozenset(
    {
        "megatron.core.parallel_state",
        "megatron.core.streams",
        "megatron.core.aux_loss_scale",
        "megatron.core.tensor_parallel.random",
        "megatron.core.num_microbatches_calculator",
        "megatron.training.global_vars",
    }
)

# Where an import may fail, where the environment is read, and where a storage may be marked or resized.
OPTIONAL_IMPORTS = "megatron.core.optional_deps"
ENVIRONMENT = "megatron.core.env"
LIFETIMES = "megatron.core.streams"

# Names of entries of a registry, and the modules and packages that are that registry.
CHOICES: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (
        frozenset({"allgather", "alltoall", "flex", "hybridep", "deepep"}),
        ("megatron.core.transformer.moe.token_dispatcher", "megatron.core.transformer.moe.dispatchers"),
    ),
    (
        frozenset({"symm_mem", "deep_ep", "collective"}),
        ("megatron.core.transformer.moe.dispatchers.hybridep",),
    ),
    (
        frozenset({"delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"}),
        ("megatron.core.fp8",),
    ),
)

# Public signatures of Megatron-LM that its users call by position or keyword; their parameters are not counted.
UPSTREAM_SIGNATURES = frozenset(
    {
        "Attention.forward",
        "Attention.__init__",
        "BlendedMegatronDatasetConfig.__init__",
        "ColumnParallelLinear.__init__",
        "GPTModel.__init__",
        "GPTModel.forward",
        "IndexedDatasetBuilder.__init__",
        "OptimizerParamScheduler.__init__",
        "RotaryEmbedding.__init__",
        "RowParallelLinear.__init__",
        "TEColumnParallelLinear.__init__",
        "TERowParallelLinear.__init__",
        "SelfAttention.__init__",
        "TransformerBlock.__init__",
        "TransformerBlock.forward",
        "TransformerLayer.__init__",
        "TransformerLayer.forward",
        "VocabParallelEmbedding.__init__",
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_with_interleaving",
        "forward_backward_pipelining_without_interleaving",
        "get_gpt_layer_local_spec",
        "get_gpt_layer_with_transformer_engine_spec",
        "initialize_model_parallel",
        "pretrain",
        "run_schedule",
    }
)

# Classes whose methods get their signature from torch.
TORCH_CALLED = frozenset({"forward", "backward", "setup_context", "jvp"})

# Where the fields of configuration dataclasses are defined, and the modules whose reading of a field proves nothing.
CONFIG_PACKAGES = ("megatron.core.configs", "megatron.training.configs")
CONFIG_MODULES = (
    "megatron.core.optimizer.optimizer_config",
    "megatron.core.distributed.ddp_config",
    "megatron.core.distributed.distributed_data_parallel_config",
)
ARGUMENT_MODULES = (
    "megatron.training.arguments",
    "megatron.training.argument_factory",
    "megatron.training.check_config",
    "megatron.training.explain_config",
    "megatron.training.flag_table",
    "megatron.training.legacy_flags",
    "megatron.training.yaml_config",
)
# Functions of those modules that turn a field into another one: the effect of the first is that of the second.
DERIVING_FUNCTIONS = frozenset({"derive", "__post_init__", "model_overrides", "derive_training", "map_to_device"})

# Packages whose functions state the shapes of their tensor arguments.
SHAPE_PACKAGES = (
    "megatron.core.transformer.moe",
    "megatron.core.fusions",
    "megatron.core.fp8",
    "megatron.core.tensor_parallel",
    "megatron.core.pipeline_parallel",
)

FILE_LINES = 400
FILE_LINES_WARNING = 300
FUNCTION_LINES = 60
KERNEL_LINES = 120
COMPLEXITY = 15
PARAMETERS = 8
README_LINES = 120
WAIVERS = 15
