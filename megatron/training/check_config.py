"""Derives and judges what spans the topics of a training run, before a device or a process group is touched.

Rules are rows, as in core/configs/compat.py; here they see all arguments at once. Problems come back as lines of the
form `field=value: constraint; remedy`, followed by the flags that the user typed.
"""

import argparse
from typing import Any

from megatron.core import env
from megatron.core.configs.base import ConfigTopic, Violation, violation
from megatron.core.configs.compat import judge as judge_rules
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.fp8.recipes import recipe_spec
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator, build_batch_size_law
from megatron.core.pipeline_parallel.actions import PlanShape
from megatron.core.pipeline_parallel.plans.interleaved import check_groups
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.token_dispatcher import dispatcher_class
from megatron.core.utils.device import uses_gpu
from megatron.training.argument_factory import GivenArguments
from megatron.training.check_rules import TRAINING_RULES
from megatron.training.flag_table import FEATURES, STATES, Feature
from megatron.training.idle_flags import idle_notices

REPEATABLE_NCCL = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")
REPEATABLE_CUBLAS = (":4096:8", ":16:8")
GPU_KERNELS = ("moe_permute_fusion", "moe_router_fusion", "cross_entropy_loss_fusion")
"""Switches of kernels whose plain form serves a CPU."""
SURPRISES = {
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": None,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "lr_decay_style": "linear",
}


def judge_flag_table(args: argparse.Namespace, given: GivenArguments) -> list[str]:
    """Refuse given flags whose feature is missing; add a notice for each that has no effect."""
    problems = []
    for feature in FEATURES:
        for flag in feature.flags:
            spelling = given.spellings.get(flag.dest)
            if spelling is None:
                continue
            value = given.values[flag.dest]
            if feature.status == "no_effect":
                given.notices.append(f"{spelling}: accepted, has no effect here: {feature.note}")
            elif feature.strict or value != flag.default:
                problems.append(_refusal(flag.dest, value, spelling, feature))
    return problems


def _refusal(dest: str, value: Any, spelling: str, feature: Feature) -> str:
    shown = repr(value) if isinstance(value, str) else value
    return f"{dest}={shown}: {feature.name}: {STATES[feature.status]}; {feature.note} (given: {spelling})"


def set_world(args: argparse.Namespace, given: GivenArguments) -> None:
    """Ranks from the launcher; a tool may name the world, or takes the smallest one that the sizes allow."""
    args.rank, args.local_rank = env.rank(), env.local_rank()
    launched = env.world_size()
    if args.explain_config and args.world_size is None and launched is None:
        args.world_size = smallest_world(args)
        args.origins["world_size"] = "derived from the parallel sizes: the smallest possible"
    elif args.world_size is None or not args.explain_config:
        if args.world_size is not None and args.world_size != (launched or 1):
            given.problems.append(
                f"world_size={args.world_size}: the launcher has started {launched or 1} process(es); "
                "drop --world-size, which is for tools that train nothing"
            )
        args.world_size = launched or 1
        args.origins["world_size"] = "WORLD_SIZE" if launched else "default: one process"


def smallest_world(args: argparse.Namespace) -> int:
    """The smallest number of ranks that both the dense and the expert sizes divide."""
    dense = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert = tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    size = max(dense, expert, 1)
    while size % max(dense, 1) or size % max(expert, 1):
        size += 1
    return size


def map_to_device(args: argparse.Namespace, given: GivenArguments) -> None:
    """Without a GPU, choices of GPU libraries become the CPU form, with one line each; `auto` is resolved."""
    has_gpu = uses_gpu(args.device)
    backend = given.spellings.get("distributed_backend")
    if not has_gpu and args.distributed_backend == "nccl":
        if backend:
            given.notices.append(f"{backend} nccl: there is no GPU, collectives run through gloo")
        args.distributed_backend = "gloo"
        args.origins["distributed_backend"] = "derived from device: no GPU"
    kernels = given.spellings.get("attention_backend")
    if kernels and not has_gpu and args.attention_backend in ("flash", "fused"):
        given.notices.append(f"{kernels} {args.attention_backend}: there is no GPU, torch's CPU kernel runs")
    _map_kernels(args, given, has_gpu)
    if args.transformer_impl == "local" or (has_gpu and args.transformer_impl == "transformer_engine"):
        return
    if args.transformer_impl == "auto":
        args.origins["transformer_impl"] = "derived from auto: the implementation that needs no further library"
        given.notices.append("transformer_impl: auto takes local")
    else:
        given.notices.append("--transformer-impl transformer_engine: there is no GPU, local runs")
        args.origins["transformer_impl"] = "derived from device: no GPU"
    args.transformer_impl = "local"


def _map_kernels(args: argparse.Namespace, given: GivenArguments, has_gpu: bool) -> None:
    """Switches of kernels are off where their plain form runs."""
    for name in GPU_KERNELS:
        if getattr(args, name) and not has_gpu:
            flag = "--" + name.replace("_", "-")
            given.notices.append(f"{flag}: there is no GPU, the plain form of the same sums runs")
            setattr(args, name, False)
    if args.moe_router_fusion and (args.moe_router_num_groups or "sinkhorn" in args.moe_router_load_balancing_type):
        given.notices.append("--moe-router-fusion: groups and sinkhorn have no kernel, their plain form runs")


def derive_training(args: argparse.Namespace) -> None:
    """Fill what follows from several topics: ranks per axis, batch sizes, lengths of the schedules."""
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size = max(args.world_size // max(model_ranks, 1), 1)
    args.origins["data_parallel_size"] = "derived from world_size and the model-parallel sizes"
    per_step = (args.micro_batch_size or 0) * args.data_parallel_size
    if args.step_batch_size_schedule is None:
        _fill(args, "global_batch_size", per_step or None, "micro_batch_size * data_parallel_size")
    _fill(args, "eval_micro_batch_size", args.micro_batch_size, "micro_batch_size")
    _fill(args, "eval_global_batch_size", args.global_batch_size or per_step or None, "global_batch_size")
    if args.train_samples is not None:
        _fill(args, "lr_decay_samples", args.train_samples, "train_samples")
    elif args.train_iters is not None:
        _fill(args, "lr_decay_iters", args.train_iters, "train_iters")
    if args.skip_train:
        _fill(args, "lr", args.min_lr, "min_lr: nothing is learned")
    if args.weight_decay_incr_style == "constant":
        _fill(args, "start_weight_decay", args.weight_decay, "weight_decay")
        _fill(args, "end_weight_decay", args.weight_decay, "weight_decay")


def _fill(args: argparse.Namespace, dest: str, value: Any, source: str) -> None:
    if getattr(args, dest) is None and value is not None:
        setattr(args, dest, value)
        args.origins[dest] = f"derived from {source}"


def judge(args: argparse.Namespace, drafts: list[ConfigTopic], given: GivenArguments) -> list[str]:
    """The lines of all broken rules: topics, rules between them, batch sizes, environment."""
    found: list[Violation] = []
    for draft in drafts:
        found.extend(draft.violations())
        if isinstance(draft, TransformerConfig):
            found.extend(DotProductAttention.check(draft))
    found.extend(judge_rules(args, TRAINING_RULES))
    if args.num_experts:
        has_budget = args.moe_expert_rank_capacity_factor is not None
        found.extend(dispatcher_class(args.moe_token_dispatcher_type, has_budget).check(args))
    lines: dict[str, None] = {}
    subjects = set()
    for item in found:
        if item.subject not in subjects and not given.unreadable.intersection(map(_dest, item.fields)):
            subjects.add(item.subject)
            lines[_with_flags(item, given)] = None
    if args.cuda_graph_impl == "full_iteration":
        lines.update(dict.fromkeys(capture_problems() + allow_expandable_segments()))
    lines.update(dict.fromkeys(_batch_problems(args, given) + _idle_query_groups(args, given)))
    if args.deterministic_mode:
        lines.update(dict.fromkeys(make_environment_deterministic()))
    add_notices(args, given)
    return list(lines)


def _with_flags(item: Violation, given: GivenArguments) -> str:
    """The violation, and which of its values the user typed under another name."""
    typed = [given.spellings[name] for name in map(_dest, item.fields) if name in given.spellings]
    evident = {"--" + name.replace("_", "-") for name in item.fields}
    unnamed = [flag for flag in dict.fromkeys(typed) if flag not in str(item) and flag not in evident]
    return f"{item} (given: {' '.join(unnamed)})" if unnamed else str(item)


def _dest(field: str) -> str:
    return {"num_moe_experts": "num_experts"}.get(field, field)


def _idle_query_groups(args: argparse.Namespace, given: GivenArguments) -> list[str]:
    groups = given.values.get("num_query_groups")
    if args.group_query_attention or groups in (None, args.num_attention_heads):
        return []
    reason = "the number of groups is read only with group-query attention"
    remedy = "add --group-query-attention or drop --num-query-groups"
    return [f"num_query_groups={groups} with group_query_attention=False: {reason}; {remedy}"]


def _batch_problems(args: argparse.Namespace, given: GivenArguments) -> list[str]:
    """Sizes that do not divide, at every point of a ramp or schedule; names the flag the user set."""
    micro, ranks = args.micro_batch_size, args.data_parallel_size
    if not micro or micro < 1 or (args.global_batch_size or 1) < 1 or not args.seq_length:
        return []
    try:
        law = build_batch_size_law(
            args.rampup_batch_size, args.global_batch_size, args.step_batch_size_schedule, args.seq_length
        )
        NumMicroBatchesCalculator(law, micro, ranks)
        for size in law.all_batch_sizes():
            _check_microbatch_groups(args, size // (micro * ranks))
    except ConfigError as error:
        return [str(error).rstrip(".")]
    evaluation = (args.eval_micro_batch_size or 1) * ranks
    typed = {"eval_global_batch_size", "eval_micro_batch_size"} & set(given.spellings)
    if typed and args.eval_global_batch_size % evaluation:
        names = "eval_global_batch_size eval_micro_batch_size data_parallel_size"
        remedy = f"make --eval-global-batch-size a multiple of {evaluation}"
        return [str(violation(args, names, "each rank evaluates whole microbatches", remedy))]
    return []


def _check_microbatch_groups(args: argparse.Namespace, num_microbatches: int) -> None:
    """Raise a ConfigError if an interleaved schedule cannot run this number of microbatches."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if chunks > 1:
        group_size, stages = args.microbatch_group_size_per_vp_stage, args.pipeline_model_parallel_size
        check_groups(PlanShape(num_microbatches, False, chunks, stages, microbatch_group_size=group_size))


def make_environment_deterministic() -> list[str]:
    """Problems of variables that make kernels unrepeatable; unset ones get their repeatable value."""
    problems = []
    algorithms = env.nccl_algo()
    if algorithms is not None and not set(algorithms.split(",")) <= set(REPEATABLE_NCCL):
        known = ", ".join(REPEATABLE_NCCL)
        problems.append(f"NCCL_ALGO={algorithms!r} with deterministic_mode=True: not repeatable; use {known}")
    workspace = env.cublas_workspace_config()
    if workspace is not None and workspace not in REPEATABLE_CUBLAS:
        known = " or ".join(REPEATABLE_CUBLAS)
        problems.append(
            f"CUBLAS_WORKSPACE_CONFIG={workspace!r} with deterministic_mode=True: not repeatable; use {known}"
        )
    engine = env.nvte_allow_nondeterministic_algo()
    if engine not in (None, "0"):
        problems.append(
            f"NVTE_ALLOW_NONDETERMINISTIC_ALGO={engine!r} with deterministic_mode=True: not repeatable; use 0"
        )
    env.set_default("NCCL_ALGO", REPEATABLE_NCCL[0])
    env.set_default("CUBLAS_WORKSPACE_CONFIG", REPEATABLE_CUBLAS[0])
    env.set_default("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    return problems


def capture_problems() -> list[str]:
    """Problems of variables under which no step can be captured."""
    captured = "with cuda_graph_impl='full_iteration'"
    problems = []
    if "backend:cudaMallocAsync" in (env.allocator_config() or ""):
        reason = "the memory of graphs is kept in a pool of torch's own allocator; drop backend:cudaMallocAsync"
        problems.append(f"PYTORCH_CUDA_ALLOC_CONF={env.allocator_config()!r} {captured}: {reason}")
    if env.has_no_memory_caching():
        reason = "the driver gives no memory during a capture; unset the variable"
        problems.append(f"PYTORCH_NO_CUDA_MEMORY_CACHING is set {captured}: {reason}")
    if env.nccl_blocking_wait():
        reason = "the host would wait for collectives that only a replay runs; unset the variable"
        problems.append(f"TORCH_NCCL_BLOCKING_WAIT=1 {captured}: {reason}")
    return problems


def allow_expandable_segments() -> list[str]:
    """Problems of an allocator that maps memory anew: NCCL must not register the buffers of a capture then."""
    if "expandable_segments:True" not in (env.allocator_config() or ""):
        return []
    if env.nccl_graph_register() not in (None, "0"):
        return [
            f"NCCL_GRAPH_REGISTER={env.nccl_graph_register()!r} with cuda_graph_impl='full_iteration' and "
            "expandable_segments:True: NCCL cannot register memory that is mapped in pieces; set NCCL_GRAPH_REGISTER=0"
        ]
    env.set_default("NCCL_GRAPH_REGISTER", "0")
    return []


def add_notices(args: argparse.Namespace, given: GivenArguments) -> None:
    """Lines about given flags that cannot act in this combination, and about defaults that surprise."""
    given.notices.extend(idle_notices(args, given))
    if args.num_experts and (args.moe_router_force_load_balancing or args.moe_router_force_biased is not None):
        given.notices.append("forced routing is for benchmarks: the model does not learn to route")
    has_own_experts = args.fp8 and args.num_experts and args.transformer_impl == "local"
    if has_own_experts and not recipe_spec(args.fp8_recipe).covers_experts:
        given.notices.append(f"--fp8-recipe {args.fp8_recipe}: covers dense layers; routed experts stay in bf16")
    kept = [f"{name}={value}" for name, value in SURPRISES.items() if name not in given.spellings]
    if not args.num_experts:
        kept = [text for text in kept if not text.startswith("moe_")]
    if kept:
        given.notices.append(f"defaults that surprise: {', '.join(kept)}; set them to silence this line")
