"""Rules that span topics, and features that are not there: one row each.

A row says when it is violated, why, and what to do instead. `refused` is invalid in itself; `not_yet` is valid and
missing here: making the feature work means removing its row. The README's status table is rendered from these rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from megatron.core.configs.base import Violation, violation
from megatron.core.configs.overlap import MOST_COMM_SMS

Status = Literal["refused", "not_yet"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule; `fields` are shown with their values, separated by spaces."""

    id: str
    status: Status
    feature: str
    fields: str
    violated_if: Callable[[Any], bool]
    why: str
    remedy: str


def above_one(name: str) -> Callable[[Any], bool]:
    """Violated if the size `name` is set and above 1."""
    return lambda config: (getattr(config, name) or 1) > 1


def _not_yet(row_id: str, feature: str, fields: str, violated_if: Callable[[Any], bool], remedy: str) -> Rule:
    return Rule(row_id, "not_yet", feature, fields, violated_if, f"{feature} is not there yet", remedy)


NOT_YET: tuple[Rule, ...] = ()


def _experts_not_divided(config: Any) -> bool:
    experts, ranks = config.num_moe_experts, config.expert_model_parallel_size
    return bool(experts) and ranks > 0 and experts % ranks != 0


def _splits(ranks: str, *sizes: str, needs: Callable[[Any], bool] = bool) -> Callable[[Any], bool]:
    """Violated if one of the `sizes` that are set is no multiple of the field `ranks`, in a model that `needs` it."""
    return lambda config: (
        needs(config) and any((getattr(config, name) or 0) % max(getattr(config, ranks) or 1, 1) for name in sizes)
    )


def _heads_not_swapped(config: Any) -> bool:
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    sizes = (config.num_attention_heads, config.num_query_groups)
    return (
        config.context_parallel_size > 1
        and "a2a" in config.cp_comm_types
        and any((size or 0) % max(ranks, 1) for size in sizes)
    )


def _has_dense_layer(config: Any) -> bool:
    return not config.num_moe_experts or (isinstance(config.moe_layer_freq, list) and 0 in config.moe_layer_freq)


def _layer_pattern_wrong(config: Any) -> bool:
    pattern = config.moe_layer_freq
    if isinstance(pattern, list):
        return len(pattern) != config.num_layers or any(entry not in (0, 1) for entry in pattern)
    return pattern < 1


REFUSED: tuple[Rule, ...] = (
    Rule(
        "ep-without-experts",
        "refused",
        "expert parallelism of a dense model",
        "expert_model_parallel_size num_moe_experts",
        lambda config: config.expert_model_parallel_size > 1 and not config.num_moe_experts,
        "a dense model has no experts to spread",
        "set --num-experts or drop --expert-model-parallel-size",
    ),
    Rule(
        "ep-divides-experts",
        "refused",
        "experts that EP does not divide",
        "num_moe_experts expert_model_parallel_size",
        _experts_not_divided,
        "every EP rank holds the same number of experts",
        "make --num-experts a multiple of --expert-model-parallel-size",
    ),
    Rule(
        "tp-divides-heads",
        "refused",
        "attention heads that TP does not divide",
        "num_attention_heads tensor_model_parallel_size",
        _splits("tensor_model_parallel_size", "num_attention_heads"),
        "every TP rank holds the same number of heads",
        "make --num-attention-heads a multiple of --tensor-model-parallel-size",
    ),
    Rule(
        "tp-divides-groups",
        "refused",
        "query groups that TP does not divide",
        "num_query_groups tensor_model_parallel_size",
        _splits("tensor_model_parallel_size", "num_query_groups"),
        "every TP rank holds whole query groups, none is copied",
        "make --num-query-groups a multiple of --tensor-model-parallel-size, or lower the latter",
    ),
    Rule(
        "tp-divides-ffn",
        "refused",
        "a dense MLP that TP does not divide",
        "ffn_hidden_size tensor_model_parallel_size",
        _splits("tensor_model_parallel_size", "ffn_hidden_size", needs=_has_dense_layer),
        "every TP rank holds the same share of the MLP",
        "make --ffn-hidden-size a multiple of --tensor-model-parallel-size",
    ),
    Rule(
        "tp-divides-shared-experts",
        "refused",
        "shared experts that TP does not divide",
        "moe_shared_expert_intermediate_size tensor_model_parallel_size",
        _splits("tensor_model_parallel_size", "moe_shared_expert_intermediate_size"),
        "every TP rank holds the same share of the shared experts",
        "make --moe-shared-expert-intermediate-size a multiple of --tensor-model-parallel-size",
    ),
    Rule(
        "etp-divides-experts-ffn",
        "refused",
        "experts that ETP does not divide",
        "moe_ffn_hidden_size expert_tensor_parallel_size",
        _splits(
            "expert_tensor_parallel_size", "moe_ffn_hidden_size", needs=lambda config: bool(config.num_moe_experts)
        ),
        "every ETP rank holds the same share of an expert",
        "make --moe-ffn-hidden-size a multiple of --expert-tensor-parallel-size, which is the TP size if unset",
    ),
    Rule(
        "etp-without-experts",
        "refused",
        "expert tensor parallelism of a dense model",
        "expert_tensor_parallel_size num_moe_experts",
        lambda config: (
            not config.num_moe_experts
            and above_one("expert_tensor_parallel_size")(config)
            and config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        ),
        "a dense model has no experts to split",
        "set --num-experts or drop --expert-tensor-parallel-size",
    ),
    Rule(
        "moe-layer-pattern",
        "refused",
        "a MoE layer pattern that does not fit the layers",
        "moe_layer_freq num_layers",
        lambda config: bool(config.num_moe_experts) and bool(config.num_layers) and _layer_pattern_wrong(config),
        "the pattern is a positive integer, or one 0 or 1 for each layer",
        "give --moe-layer-freq as many entries as --num-layers",
    ),
    Rule(
        "moe-tp-needs-sp",
        "refused",
        "MoE with TP but without sequence parallelism",
        "num_moe_experts tensor_model_parallel_size sequence_parallel",
        lambda config: (
            bool(config.num_moe_experts) and config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        ),
        "TP ranks would route the same tokens several times",
        "add --sequence-parallel",
    ),
    Rule(
        "cp-attention-dropout",
        "refused",
        "dropout in attention under context parallelism",
        "context_parallel_size attention_dropout",
        lambda config: config.context_parallel_size > 1 and config.attention_dropout > 0.0,
        "the scores of a sequence are spread over ranks, which share no random numbers",
        "set --attention-dropout 0",
    ),
    Rule(
        "cp-comm-type-per-layer",
        "refused",
        "a list of CP algorithms that does not fit the layers",
        "cp_comm_type num_layers",
        lambda config: isinstance(config.cp_comm_type, list) and len(config.cp_comm_type) != config.num_layers,
        "there is one algorithm for all layers, or one for each",
        "give --cp-comm-type one entry, or as many as --num-layers",
    ),
    Rule(
        "cp-comm-type-hierarchical",
        "refused",
        "hierarchical context parallelism",
        "cp_comm_type context_parallel_size",
        lambda config: config.context_parallel_size > 1 and "a2a+p2p" in config.cp_comm_types,
        "CP ranks form one group, without levels",
        "use --cp-comm-type p2p, all_gather or a2a",
    ),
    Rule(
        "cp-a2a-divides-heads",
        "refused",
        "a swap of positions for heads that CP does not divide",
        "cp_comm_type num_attention_heads num_query_groups tensor_model_parallel_size context_parallel_size",
        _heads_not_swapped,
        "every rank gets the same number of heads and of query groups",
        "make --num-attention-heads and --num-query-groups multiples of TP * CP, or use --cp-comm-type p2p",
    ),
    Rule(
        "moe-bias-etp",
        "refused",
        "biased experts split by ETP",
        "add_bias_linear expert_tensor_parallel_size",
        lambda config: (
            bool(config.num_moe_experts) and config.add_bias_linear and config.expert_tensor_parallel_size > 1
        ),
        "the bias of a split expert would be added once per shard",
        "add --disable-bias-linear or set --expert-tensor-parallel-size 1",
    ),
)


def _needs_overlap(name: str, feature: str, flag: str) -> Rule:
    """A switch of the combined schedule without that schedule."""
    return Rule(
        f"{name}-needs-overlap",
        "refused",
        f"{feature} without the combined schedule",
        f"{name} overlap_moe_expert_parallel_comm",
        lambda config: getattr(config, name) and not config.overlap_moe_expert_parallel_comm,
        "it would have no effect",
        f"add --overlap-moe-expert-parallel-comm or drop {flag}",
    )


OVERLAP: tuple[Rule, ...] = (
    Rule(
        "overlap-needs-ep",
        "refused",
        "hiding expert communication without expert parallelism",
        "overlap_moe_expert_parallel_comm expert_model_parallel_size",
        lambda config: config.overlap_moe_expert_parallel_comm and config.expert_model_parallel_size == 1,
        "there is no exchange to hide",
        "set --expert-model-parallel-size above 1 or drop --overlap-moe-expert-parallel-comm",
    ),
    Rule(
        "overlap-needs-chunks",
        "refused",
        "hiding expert communication in a pipeline without interleaving",
        "overlap_moe_expert_parallel_comm pipeline_model_parallel_size virtual_pipeline_model_parallel_size",
        lambda config: (
            config.overlap_moe_expert_parallel_comm
            and config.pipeline_model_parallel_size > 1
            and (config.virtual_pipeline_model_parallel_size or 1) == 1
        ),
        "with one chunk a stage has no forward that is independent of the backward beside it",
        "add --num-virtual-stages-per-pipeline-rank 2 or drop --overlap-moe-expert-parallel-comm",
    ),
    Rule(
        "overlap-needs-sms",
        "refused",
        "experts that leave most of the device to the exchange beside them",
        "overlap_moe_expert_parallel_comm moe_flex_dispatcher_num_sms",
        lambda config: (
            config.overlap_moe_expert_parallel_comm and (config.moe_flex_dispatcher_num_sms or 0) > MOST_COMM_SMS
        ),
        f"beside overlap the products of the experts run without these multiprocessors, at most {MOST_COMM_SMS}",
        "lower --moe-flex-dispatcher-num-sms or drop it",
    ),
    _needs_overlap("delay_wgrad_compute", "delayed weight gradients", "--delay-wgrad-compute"),
    _needs_overlap(
        "ep_overlap_early_attn_memory_release",
        "early release of attention's memory",
        "--ep-overlap-early-attn-memory-release",
    ),
    _needs_overlap(
        "high_priority_a2a_comm_stream", "priority of the communication stream", "--high-priority-a2a-comm-stream"
    ),
)


def _recomputes(config: Any, module: str) -> bool:
    return config.recompute_granularity == "selective" and module in (config.recompute_modules or ())


def _module_needs(module: str, sizes: str, is_there: Callable[[Any], bool], why: str) -> Rule:
    """A part that selective recompute names and the model has not."""
    return Rule(
        f"recompute-{module}",
        "refused",
        f"recompute of {module} in a model without it",
        f"recompute_modules {sizes}",
        lambda config: _recomputes(config, module) and not is_there(config),
        why,
        f"take {module} out of --recompute-modules",
    )


def _has_experts(config: Any) -> bool:
    return bool(config.num_moe_experts)


RECOMPUTE: tuple[Rule, ...] = (
    _module_needs("moe", "num_moe_experts", _has_experts, "a dense model has no experts"),
    _module_needs("moe_act", "num_moe_experts", _has_experts, "a dense model has no experts"),
    _module_needs(
        "shared_experts",
        "moe_shared_expert_intermediate_size",
        lambda config: bool(config.moe_shared_expert_intermediate_size),
        "the model has no shared experts",
    ),
    _module_needs("mlp", "num_moe_experts moe_layer_freq", _has_dense_layer, "no layer has a dense MLP"),
    Rule(
        "distribute-saved-needs-tp",
        "refused",
        "distributed activations without whole copies on TP ranks",
        "distribute_saved_activations tensor_model_parallel_size sequence_parallel",
        lambda config: (
            config.distribute_saved_activations and (config.tensor_model_parallel_size == 1 or config.sequence_parallel)
        ),
        "only TP without sequence parallelism has several copies of a layer's input",
        "drop --distribute-saved-activations",
    ),
    Rule(
        "overlap-recompute-moe",
        "refused",
        "recompute of MoE parts beside overlapped expert communication",
        "overlap_moe_expert_parallel_comm recompute_modules",
        lambda config: config.overlap_moe_expert_parallel_comm and _recomputes(config, "moe"),
        "the exchange inside this part is a stage of its own there",
        "use --recompute-granularity full, or take moe out of --recompute-modules",
    ),
)

RULES: tuple[Rule, ...] = NOT_YET + REFUSED + OVERLAP + RECOMPUTE


def judge(config: Any, rules: tuple[Rule, ...] = RULES) -> list[Violation]:
    """The violations of all rules for one configuration."""
    broken = (rule for rule in rules if rule.violated_if(config))
    return [violation(config, rule.fields, rule.why, rule.remedy) for rule in broken]
