"""Rules that span the topics of a training run, one row each; `violated_if` sees all arguments.

The rows of the model alone are in core/configs/compat.py.
"""

from typing import Any

from megatron.core.configs.compat import Rule
from megatron.core.fp8.recipes import Scaling, recipe_spec
from megatron.core.utils.device import uses_gpu


def _refused(rule_id: str, feature: str, fields: str, violated_if: Any, why: str, remedy: str) -> Rule:
    return Rule(rule_id, "refused", feature, fields, violated_if, why, remedy)


def _model_ranks(args: Any) -> int:
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size


def _expert_ranks(args: Any) -> int:
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size


def _warmup_reaches_decay(args: Any) -> bool:
    unit = "samples" if args.train_samples is not None else "iters"
    decay = getattr(args, f"lr_decay_{unit}")
    return decay is not None and getattr(args, f"lr_warmup_{unit}") >= decay > 0


def _wsd_without_length(args: Any) -> bool:
    unit = "samples" if args.train_samples is not None else "iters"
    return args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None


def _turned_channels(args: Any) -> int:
    """Channels of a head that RoPE turns."""
    return int((args.kv_channels or 0) * args.rotary_percent)


def _is_captured(args: Any) -> bool:
    return args.cuda_graph_impl == "full_iteration"


def _may_be_undone(args: Any) -> bool:
    """Whether a guard decides at the end of a step if it counts."""
    return _is_captured(args) or (bool(args.num_experts) and args.moe_expert_rank_capacity_factor is not None)


def _has_engine(args: Any) -> bool:
    return args.transformer_impl == "transformer_engine"


def _any_data(args: Any) -> bool:
    names = (
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "data_args_path",
        "per_split_data_args_path",
    )
    return args.mock_data or args.dataloader_type == "external" or any(getattr(args, name) for name in names)


def _other_unit(name: str, unit: str) -> Rule:
    """A schedule given in iterations in a run by samples, or the other way round."""
    run, other = ("train_samples", "samples") if unit == "iters" else ("train_iters", "iters")
    field, twin = f"{name}_{unit}", f"{name}_{other}".replace("_", "-")
    conflicting = "train_iters" if unit == "iters" else "train_samples"
    return _refused(
        f"{field}-in-run-by-{other}",
        "schedules in another unit than the run",
        f"{field} {run}",
        lambda args: (
            bool(getattr(args, field)) and getattr(args, run) is not None and getattr(args, conflicting) is None
        ),
        "schedules count in the unit of the run",
        f"use --{twin}",
    )


SCHEDULE_UNITS = tuple(
    _other_unit(name, unit) for name in ("lr_decay", "lr_warmup", "lr_wsd_decay") for unit in ("iters", "samples")
)

ENGINE_RULES = (
    _refused(
        "engine-recipe",
        "FP8 recipes that Transformer Engine lacks",
        "transformer_impl fp8_recipe",
        lambda args: _has_engine(args) and bool(args.fp8) and recipe_spec(args.fp8_recipe).scaling is Scaling.ROW,
        "it has no scales of rows",
        "use --fp8-recipe delayed, tensorwise or blockwise, or --transformer-impl local",
    ),
    _refused(
        "engine-fp8-wgrad",
        "weight gradients in high precision in FP8 layers of Transformer Engine",
        "transformer_impl fp8_wgrad",
        lambda args: _has_engine(args) and bool(args.fp8) and not args.fp8_wgrad,
        "its weight gradients take the precision of the recipe",
        "drop --no-fp8-wgrad, or use --transformer-impl local",
    ),
    _refused(
        "engine-delayed-wgrad",
        "delayed weight gradients of Transformer Engine beside gradients of autograd",
        "transformer_impl delay_wgrad_compute gradient_accumulation_fusion",
        lambda args: _has_engine(args) and args.delay_wgrad_compute and not args.gradient_accumulation_fusion,
        "it hands unfinished gradients to autograd",
        "drop --no-gradient-accumulation-fusion or --delay-wgrad-compute, or use --transformer-impl local",
    ),
)

CODED_GATHER_RULES = (
    _refused(
        "coded-gather-layers",
        "parameters gathered in FP8 without FP8 layers of the local implementation",
        "fp8_param_gather fp8 transformer_impl",
        lambda args: args.fp8_param_gather and (not args.fp8 or _has_engine(args)),
        "only their weights are used as codes",
        "add --fp8-format and --transformer-impl local, or drop --fp8-param-gather",
    ),
    _refused(
        "coded-gather-rows",
        "parameters gathered in FP8 with scales of rows",
        "fp8_param_gather fp8_recipe",
        lambda args: args.fp8_param_gather and bool(args.fp8) and recipe_spec(args.fp8_recipe).scaling is Scaling.ROW,
        "a weight has a set of codes for each orientation, no fewer bytes than bf16",
        "use --fp8-recipe tensorwise, or drop --fp8-param-gather",
    ),
    _refused(
        "coded-gather-undone",
        "parameters gathered in FP8 in steps that may be undone",
        "fp8_param_gather cuda_graph_impl moe_expert_rank_capacity_factor fp16",
        lambda args: args.fp8_param_gather and (_may_be_undone(args) or args.fp16),
        "codes made from amaxes of the step would stay",
        "drop --fp8-param-gather, or --cuda-graph-impl, --moe-expert-rank-capacity-factor and --fp16",
    ),
)

TRAINING_RULES: tuple[Rule, ...] = (
    *SCHEDULE_UNITS,
    *ENGINE_RULES,
    *CODED_GATHER_RULES,
    _refused(
        "world-dense",
        "a world that the model-parallel sizes do not divide",
        "world_size tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size",
        lambda args: _model_ranks(args) > 0 and args.world_size % _model_ranks(args) != 0,
        "the number of processes must be a multiple of TP * PP * CP",
        "start another number of processes or change the sizes",
    ),
    _refused(
        "world-expert",
        "a world that the expert-parallel sizes do not divide",
        "world_size expert_tensor_parallel_size expert_model_parallel_size pipeline_model_parallel_size",
        lambda args: _expert_ranks(args) > 0 and args.world_size % _expert_ranks(args) != 0,
        "the number of processes must be a multiple of ETP * EP * PP",
        "start another number of processes or change --expert-model-parallel-size",
    ),
    _refused(
        "log-overlap-needs-overlap",
        "the share of hidden communication without the combined schedule",
        "log_overlap overlap_moe_expert_parallel_comm",
        lambda args: args.log_overlap and not args.overlap_moe_expert_parallel_comm,
        "nothing is hidden that could be measured",
        "add --overlap-moe-expert-parallel-comm or drop --log-overlap",
    ),
    _refused(
        "log-overlap-or-check-streams",
        "measuring and checking streams at once",
        "log_overlap check_streams",
        lambda args: args.log_overlap and args.check_streams,
        "streams have one observer",
        "drop --log-overlap or --check-streams",
    ),
    _refused(
        "sp-divides-sequence",
        "sequence parallelism over a length that TP does not divide",
        "seq_length tensor_model_parallel_size sequence_parallel",
        lambda args: (
            bool(args.sequence_parallel and args.seq_length)
            and args.context_parallel_size == 1
            and args.seq_length % max(args.tensor_model_parallel_size, 1) != 0
        ),
        "every TP rank holds an equal shard of the sequence",
        "make --seq-length a multiple of --tensor-model-parallel-size, or drop --sequence-parallel",
    ),
    _refused(
        "sp-divides-cp-part",
        "sequence parallelism over a part of the sequence that TP does not divide",
        "seq_length tensor_model_parallel_size context_parallel_size sequence_parallel",
        lambda args: (
            bool(args.sequence_parallel and args.seq_length)
            and args.context_parallel_size > 1
            and args.seq_length % max(args.tensor_model_parallel_size * args.context_parallel_size, 1) != 0
        ),
        "every TP rank holds an equal shard of the part of its CP rank",
        "make --seq-length a multiple of TP * CP, or drop --sequence-parallel",
    ),
    _refused(
        "cp-divides-sequence",
        "context parallelism over a length that does not cut in pairs of chunks",
        "seq_length context_parallel_size",
        lambda args: (
            args.context_parallel_size > 1
            and bool(args.seq_length)
            and args.seq_length % (2 * args.context_parallel_size) != 0
        ),
        "every CP rank holds one early and one late chunk of equal length",
        "make --seq-length a multiple of 2 * CP",
    ),
    _refused(
        "warmup-before-decay",
        "a warm-up longer than the decay",
        "lr_warmup_iters lr_decay_iters lr_warmup_samples lr_decay_samples",
        _warmup_reaches_decay,
        "the decay includes the warm-up and must be longer",
        "lower --lr-warmup-iters (or -samples) or raise --lr-decay-iters (or -samples)",
    ),
    _refused(
        "rope-pairs",
        "rotary positions on no or on half a pair of channels",
        "kv_channels rotary_percent position_embedding_type",
        lambda args: (
            args.position_embedding_type == "rope" and (_turned_channels(args) < 2 or _turned_channels(args) % 2 != 0)
        ),
        "channels turn in pairs",
        "make --kv-channels times --rotary-percent an even number, at least 2",
    ),
    _refused(
        "wsd-length",
        "WSD without the length of its final decay",
        "lr_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
        _wsd_without_length,
        "WSD ends with a decay of a given length",
        "set --lr-wsd-decay-iters, or --lr-wsd-decay-samples in a run by samples",
    ),
    _refused(
        "step-schedule-needs-samples",
        "a batch size schedule in a run by iterations",
        "step_batch_size_schedule train_iters",
        lambda args: args.step_batch_size_schedule is not None and args.train_samples is None,
        "the samples of an iteration change, so schedules cannot count iterations",
        "give the length with --train-samples",
    ),
    _refused(
        "lr-missing",
        "training without a learning rate",
        "lr",
        lambda args: args.lr is None and not args.skip_train,
        "training needs a learning rate",
        "set --lr",
    ),
    _refused(
        "warmup-starts-above-peak",
        "a warm-up that starts above the peak",
        "lr_warmup_init lr",
        lambda args: args.lr is not None and args.lr_warmup_init > args.lr,
        "warm-up rises to the peak",
        "lower --lr-warmup-init or raise --lr",
    ),
    _refused(
        "fp16-cross-entropy",
        "an fp16 cross entropy without fp16",
        "fp16_lm_cross_entropy fp16",
        lambda args: args.fp16_lm_cross_entropy and not args.fp16,
        "the logits are not in fp16",
        "add --fp16 or drop --fp16-lm-cross-entropy",
    ),
    _refused(
        "per-token-average",
        "averaging collectives with a per-token loss",
        "calculate_per_token_loss ddp_average_in_collective",
        lambda args: args.calculate_per_token_loss and args.ddp_average_in_collective,
        "per-token gradients are summed and divided by the token count afterwards",
        "drop --ddp-average-in-collective or --calculate-per-token-loss",
    ),
    _refused(
        "graph-cpu",
        "captured steps on a CPU",
        "cuda_graph_impl device",
        lambda args: _is_captured(args) and args.device == "cpu",
        "a CUDA graph needs a GPU",
        "drop --cuda-graph-impl full_iteration, or run on a GPU",
    ),
    _refused(
        "graph-check-streams",
        "captured steps under the stream checker",
        "cuda_graph_impl check_streams",
        lambda args: _is_captured(args) and args.check_streams,
        "a replay shows the checker no operation",
        "check the same run with --cuda-graph-impl none",
    ),
    _refused(
        "graph-weight-decay",
        "captured steps under a weight decay that changes",
        "cuda_graph_impl weight_decay_incr_style",
        lambda args: _is_captured(args) and args.weight_decay_incr_style != "constant",
        "a captured step keeps the weight decay that it was captured with",
        "use --weight-decay-incr-style constant",
    ),
    _refused(
        "graph-recompute-dropout",
        "captured steps that recompute random numbers",
        "cuda_graph_impl recompute_granularity attention_dropout hidden_dropout",
        lambda args: (
            _is_captured(args)
            and getattr(args, "recompute_granularity", None) is not None
            and (args.attention_dropout > 0 or args.hidden_dropout > 0 or bool(args.moe_input_jitter_eps))
        ),
        "random numbers cannot be drawn a second time inside a capture",
        "set --attention-dropout 0 --hidden-dropout 0 and no --moe-input-jitter-eps, or drop --recompute-granularity",
    ),
    _refused(
        "profile-needs-gpu",
        "ranges for Nsight Systems in a run on a CPU",
        "profile use_pytorch_profiler device",
        lambda args: args.profile and not args.use_pytorch_profiler and not uses_gpu(args.device),
        "they are marked by the CUDA driver",
        "add --use-pytorch-profiler, or drop --profile",
    ),
    _refused(
        "profile-ranks",
        "a profile of ranks that the run does not have",
        "profile_ranks world_size",
        lambda args: args.profile and any(not 0 <= rank < args.world_size for rank in args.profile_ranks),
        "ranks are counted from 0 to the world size less 1",
        "correct --profile-ranks, or drop it to profile all",
    ),
    _refused(
        "no-data",
        "training without data",
        "data_path mock_data",
        lambda args: not _any_data(args),
        "a run needs a source of data",
        "set --data-path, or --mock-data for a synthetic one",
    ),
    _refused(
        "no-tokenizer",
        "training without a tokenizer",
        "tokenizer_type",
        lambda args: args.tokenizer_type is None,
        "the vocabulary comes from the tokenizer",
        "set --tokenizer-type, for instance ByteTokenizer or NullTokenizer with --vocab-size",
    ),
)
