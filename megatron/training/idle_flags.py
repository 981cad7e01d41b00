"""Flags that have no effect beside others: one row each, and one line at start-up where a row finds such flags.

What cannot work is refused by the rules; what is merely not read here is accepted, as launch lines are pasted whole.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.configs.flag_spec import flag_specs
from megatron.core.configs.fp8 import Fp8Config
from megatron.core.configs.moe import MoEConfig
from megatron.core.fp8.recipes import recipe_spec
from megatron.core.utils.device import uses_gpu
from megatron.training.argument_factory import GivenArguments
from megatron.training.flag_table import FEATURES


@dataclasses.dataclass(frozen=True)
class IdleRow:
    """Destinations, separated by spaces, that nothing reads where `is_idle(args)`; `{name}` shows an argument."""

    dests: str
    is_idle: Callable[[Any], bool]
    reason: str


def _has_no_aux_loss(args: Any) -> bool:
    balancing = args.moe_router_load_balancing_type
    coefficients = args.moe_aux_loss_coeff
    some = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    return some and balancing in ("none", ["none"])


def _has_no_dynamic_scale(args: Any) -> bool:
    return not args.fp16 or args.loss_scale is not None


def _loads_nothing(args: Any) -> bool:
    return args.load is None and args.pretrained_checkpoint is None


def _has_no_biased_gelu(args: Any) -> bool:
    return args.swiglu or args.squared_relu or not args.add_bias_linear


def _unread_by(*types: str) -> Callable[[Any], bool]:
    return lambda args: args.tokenizer_type is not None and args.tokenizer_type not in types


PIECES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER = "the tokenizer is {tokenizer_type}"
MODEL: tuple[IdleRow, ...] = (
    IdleRow(
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
        "rope_scaling_factor apply_rope_fusion",
        lambda args: args.position_embedding_type != "rope",
        "positions are {position_embedding_type}",
    ),
    IdleRow(
        "rope_scaling_factor",
        lambda args: args.position_embedding_type == "rope" and not args.use_rope_scaling,
        "no --use-rope-scaling is given",
    ),
    IdleRow("bias_gelu_fusion", _has_no_biased_gelu, "no MLP has a GELU behind a bias"),
    IdleRow("bias_swiglu_fusion", lambda args: not args.swiglu, "no --swiglu is given"),
    IdleRow("apply_wd_to_qk_layernorm", lambda args: not args.qk_layernorm, "no --qk-layernorm is given"),
    IdleRow("sequence_parallel", lambda args: not args.sequence_parallel, "there is no tensor parallelism"),
    IdleRow("cp_comm_type", lambda args: args.context_parallel_size == 1, "there is no context parallelism"),
    IdleRow(
        "overlap_p2p_comm account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "use_tp_pp_dp_mapping",
        lambda args: args.pipeline_model_parallel_size == 1,
        "there is no pipeline parallelism",
    ),
)
EXPERTS: tuple[IdleRow, ...] = (
    IdleRow("moe_aux_loss_coeff", _has_no_aux_loss, "--moe-router-load-balancing-type none has no balancing loss"),
    IdleRow(
        "moe_router_bias_update_rate",
        lambda args: not args.moe_router_enable_expert_bias,
        "no --moe-router-enable-expert-bias is given",
    ),
    IdleRow(
        "moe_token_drop_policy",
        lambda args: args.moe_expert_capacity_factor is None,
        "no --moe-expert-capacity-factor is given, so no token is dropped",
    ),
    IdleRow(
        "moe_shared_expert_gate",
        lambda args: not args.moe_shared_expert_intermediate_size,
        "no --moe-shared-expert-intermediate-size is given",
    ),
    IdleRow(
        "moe_router_pre_softmax",
        lambda args: args.moe_router_score_function != "softmax",
        "scores are {moe_router_score_function}",
    ),
)
PRECISION: tuple[IdleRow, ...] = (
    IdleRow(
        " ".join(spec.dest for spec in flag_specs(Fp8Config) if spec.dest != "fp8"),
        lambda args: args.fp8 is None,
        "no --fp8-format is given",
    ),
    IdleRow(
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        lambda args: args.fp8 is not None and not recipe_spec(args.fp8_recipe).uses_history,
        "--fp8-recipe {fp8_recipe} takes scales from the tensors themselves",
    ),
    IdleRow(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        lambda args: args.fp8 is not None and not args.first_last_layers_bf16,
        "no --first-last-layers-bf16 is given",
    ),
    IdleRow(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        _has_no_dynamic_scale,
        "the loss has no scale that moves, as with --fp16 alone",
    ),
    IdleRow("cuda_graph_warmup_steps", lambda args: args.cuda_graph_impl == "none", "no step is captured"),
)
LEARNING: tuple[IdleRow, ...] = (
    IdleRow("adam_beta1 adam_beta2 adam_eps", lambda args: args.optimizer != "adam", "the optimizer is {optimizer}"),
    IdleRow("sgd_momentum", lambda args: args.optimizer != "sgd", "the optimizer is {optimizer}"),
    IdleRow("min_lr", lambda args: args.lr_decay_style == "constant" and not args.skip_train, "the rate is constant"),
    IdleRow(
        "lr_decay_iters lr_decay_samples",
        lambda args: args.lr_decay_style == "constant" and args.lr_warmup_fraction is None,
        "the rate is constant",
    ),
    IdleRow(
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
        lambda args: args.lr_decay_style != "WSD",
        "the decay is {lr_decay_style}",
    ),
)
RUN: tuple[IdleRow, ...] = (
    IdleRow(
        "eval_interval eval_micro_batch_size eval_global_batch_size full_validation",
        lambda args: args.eval_iters == 0,
        "--eval-iters 0 means no evaluation",
    ),
    IdleRow("manual_gc_interval manual_gc_eval", lambda args: not args.manual_gc, "no --manual-gc is given"),
    IdleRow("exit_signal", lambda args: not args.exit_signal_handler, "no --exit-signal-handler is given"),
    IdleRow("empty_unused_memory_level", lambda args: not uses_gpu(args.device), "there is no GPU"),
    IdleRow("no_save_optim no_save_rng ckpt_fully_parallel_save", lambda args: args.save is None, "nothing is saved"),
    IdleRow(
        "no_load_optim no_load_rng finetune verify_integrity ckpt_fully_parallel_load dist_ckpt_strictness "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        _loads_nothing,
        "nothing is loaded",
    ),
    IdleRow(
        "tensorboard_log_interval log_timers_to_tensorboard log_memory_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_loss_scale_to_tensorboard log_world_size_to_tensorboard",
        lambda args: not (args.tensorboard_dir or args.wandb_project),
        "there is neither --tensorboard-dir nor --wandb-project",
    ),
    IdleRow("tensorboard_queue_size", lambda args: not args.tensorboard_dir, "no --tensorboard-dir is given"),
    IdleRow(
        "wandb_exp_name wandb_entity wandb_save_dir",
        lambda args: not args.wandb_project,
        "no --wandb-project is given",
    ),
    IdleRow(
        "profile_step_start profile_step_end profile_ranks use_pytorch_profiler pytorch_profiler_collect_shapes "
        "pytorch_profiler_collect_callstack",
        lambda args: not args.profile,
        "no --profile is given",
    ),
    IdleRow(
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
        lambda args: args.profile and not args.use_pytorch_profiler,
        "no --use-pytorch-profiler is given",
    ),
)
DATA: tuple[IdleRow, ...] = (
    IdleRow("mmap_bin_files", lambda args: args.mock_data, "--mock-data reads no file"),
    IdleRow("data_sharding", lambda args: args.dataloader_type != "cyclic", "the order is {dataloader_type}"),
    IdleRow(
        "create_attention_mask_in_dataloader",
        lambda args: not args.reset_attention_mask,
        "no --reset-attention-mask is given, and causal masks are never shipped",
    ),
    IdleRow("tokenizer_model", _unread_by(*PIECES, "HuggingFaceTokenizer", "TikTokenizer"), TOKENIZER),
    IdleRow("vocab_file merge_file", _unread_by("GPT2BPETokenizer"), TOKENIZER),
    IdleRow("tiktoken_pattern tiktoken_num_special_tokens", _unread_by("TikTokenizer"), TOKENIZER),
    IdleRow("trust_remote_code", _unread_by("HuggingFaceTokenizer"), TOKENIZER),
    IdleRow("vocab_size", _unread_by("NullTokenizer", "TikTokenizer"), TOKENIZER),
)
DENSE = IdleRow(
    " ".join(spec.dest for spec in flag_specs(MoEConfig) if spec.dest != "num_experts"),
    lambda args: not args.num_experts,
    "the model has no experts",
)
ROWS = (DENSE, *MODEL, *EXPERTS, *PRECISION, *LEARNING, *RUN, *DATA)


def idle_notices(args: argparse.Namespace, given: GivenArguments) -> list[str]:
    """One line for each reason, with all given flags that it leaves without effect."""
    told = {flag for feature in FEATURES for spec in feature.flags for flag in spec.spellings}
    lines: dict[str, list[str]] = {}
    for row in ROWS:
        idle = [given.spellings[dest] for dest in row.dests.split() if dest in given.spellings]
        idle = [flag for flag in dict.fromkeys(idle) if flag not in told]
        if idle and row.is_idle(args):
            lines.setdefault(row.reason.format(**vars(args)), []).extend(idle)
            told.update(idle)
    return [f"{' '.join(flags)}: accepted, no effect here: {reason}" for reason, flags in lines.items()]
