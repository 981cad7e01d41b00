"""How tokens travel to the ranks of their experts and back: the base class, its state and traits, the registry.

A dispatcher is six phases, so that communication stands alone and a schedule can put it on another stream:

    hidden [T, h] --dispatch_preprocess--> rows [S, h]      local: order rows by destination
                  --token_dispatch-------> rows [S', h]     communication only
                  --dispatch_postprocess-> rows [R, h]      local: order rows by expert
                      experts
                  --combine_preprocess---> rows [S', h]     local: back to the order of arrival
                  --token_combine--------> rows [S, h]      communication only
                  --combine_postprocess--> hidden [T, h]    local: add up the rows of each token

Everything that belongs to one microbatch is in the `DispatchState` that the first phase makes and the others are given;
a dispatcher keeps none of it, because several microbatches are in flight. What a configuration implies for the rest of
the tree is answered by `traits`: nothing else asks a dispatcher for its name.

To add one: a module in `dispatchers/` with a subclass, and a line in `DISPATCHERS`.

With expert tensor parallelism (ETP) each row goes to all shards of its expert, and combine adds up what they return;
under sequence parallelism the tokens of a rank are its shard of the sequence.

Legend: T tokens of this rank, h width, E experts, n experts of this rank, S rows sent, R rows at the experts.
"""

import abc
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core import step_guard
from megatron.core.configs.base import Violation, violation
from megatron.core.configs.transformer import TransformerConfig
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.capacity import expert_capacity
from megatron.core.transformer.moe.dispatchers.token_counts import require_equal_tokens
from megatron.core.transformer.moe.permute import FusedRowOrder, RowOrder, build_row_order
from megatron.core.utils.divide import divide
from megatron.core.utils.groups import group_rank, group_size

DISPATCHERS = {
    "allgather": ("megatron.core.transformer.moe.dispatchers.allgather", "MoEAllGatherTokenDispatcher"),
    "alltoall": ("megatron.core.transformer.moe.dispatchers.alltoall", "MoEAlltoAllTokenDispatcher"),
    "flex": ("megatron.core.transformer.moe.dispatchers.hybridep.dispatcher", "MoEFlexTokenDispatcher"),
}
"""Value of --moe-token-dispatcher-type -> module and class; the module is imported when the dispatcher is built."""

DISPATCHERS_WITH_BUDGET = {
    "alltoall": ("megatron.core.transformer.moe.dispatchers.padded_alltoall", "MoEPaddedAlltoAllTokenDispatcher"),
}
"""The form of a dispatcher that takes a row budget, where it is a class of its own."""


@dataclasses.dataclass(frozen=True)
class DispatcherTraits:
    """What a dispatcher does in the configuration it was built for."""

    host_sync_free: bool
    """No phase makes the host wait for the device, once shapes have been seen."""

    static_shapes: bool
    """Row counts depend on input shapes only, never on the routing."""

    deduplicates: bool
    """A token travels once per destination rank instead of once per expert."""

    postprocess_aliases_input: bool
    """`dispatch_postprocess` returns the rows it was given: the experts save the communication's own output."""

    fuses_permute: bool
    """`token_dispatch` delivers rows in expert order."""

    overlaps_shared_experts: bool
    """Shared experts may run beside the communication phases."""

    supports_capacity: bool
    """Dropped and padded routing maps are carried out as they are."""

    probs_dtype: torch.dtype
    """Dtype in which probabilities travel."""


@dataclasses.dataclass(kw_only=True)
class DispatchState:
    """What one microbatch leaves in one layer between the phases, without gradient."""

    num_tokens: int
    """T, tokens of this rank."""

    hidden_dtype: torch.dtype
    """Dtype of the hidden states, in which the result is returned."""

    tokens_per_expert: torch.Tensor | None = None
    """int64 [n] on the device, rows of each local expert."""

    host_tokens_per_expert: list[int] | None = None
    """The same on the host, if the dispatcher had to read it anyway."""

    dropped_rows: torch.Tensor | None = None
    """int64 [1] on the device, rows beyond this rank's budget; None if there is no budget."""

    output_shape: torch.Size | None = None
    """Shape [s, b, h] of the layer's input, kept for the layer."""


class MoETokenDispatcher(abc.ABC):
    """Base of all dispatchers.

    Args:
        num_local_experts: n, experts of this rank.
        local_expert_indices: Their global ids, which are contiguous.
        config: Configuration of the model.
        pg_collection: Process groups; None takes those of `parallel_state`.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        self.config = config
        self.ep_group = groups.ep
        self.ep_size = group_size(groups.ep)
        self.etp_group = groups.expt_tp
        self.etp_size = group_size(groups.expt_tp)
        self.expert_ranks_group = groups.tp_ep
        self.num_experts = num_local_experts * self.ep_size
        self.num_local_experts = num_local_experts
        self.local_expert_indices = list(local_expert_indices)
        self.topk = config.moe_router_topk
        self.row_multiple = 1  # rows of each expert arrive as a multiple of this, with rows of zeros in between
        self._agreed_tokens: dict[int, int] = {}

    has_row_budget = False
    """True if the rows of a rank can have a budget, and what does not fit is reported to the step's guard."""

    packs_rows = False
    """True if rows can travel in FP8."""

    has_backends = False
    """True if --moe-flex-dispatcher-backend chooses what moves the rows."""

    @classmethod
    def check(cls, config: Any) -> list[Violation]:
        """Judge the options that only some dispatchers have; `config` holds the fields of `MoEConfig`."""
        found = []
        if config.moe_expert_rank_capacity_factor is not None and not cls.has_row_budget:
            names = "moe_expert_rank_capacity_factor moe_token_dispatcher_type"
            remedy = "use --moe-token-dispatcher-type alltoall or flex, or drop --moe-expert-rank-capacity-factor"
            found.append(violation(config, names, "this dispatcher has no budget of rows", remedy))
        if config.moe_dispatch_fwd_dtype != "bf16" and not cls.packs_rows:
            names = "moe_dispatch_fwd_dtype moe_token_dispatcher_type"
            remedy = "use --moe-token-dispatcher-type flex, or drop --moe-dispatch-fwd-dtype"
            found.append(violation(config, names, "this dispatcher sends rows as they are", remedy))
        return found

    @property
    @abc.abstractmethod
    def traits(self) -> DispatcherTraits:
        """Traits in this configuration."""

    @property
    def probs_dtype(self) -> torch.dtype:
        """Dtype that the router gives its probabilities in this configuration."""
        wanted = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype or "")
        params = self.config.params_dtype
        return params if wanted is None else torch.promote_types(wanted, params)

    @property
    def has_all_experts(self) -> bool:
        """True if every expert of the layer is on this rank, whole."""
        return self.ep_size == 1 and self.etp_size == 1

    @property
    def is_dropless(self) -> bool:
        """True if every token has exactly k rows."""
        return self.config.moe_expert_capacity_factor is None

    @property
    def is_padded(self) -> bool:
        """True if every expert gets exactly its capacity."""
        return self.config.moe_pad_expert_input_to_capacity

    def row_order(
        self, routing_map: torch.Tensor, num_rows: int, rows_per_token: int | None
    ) -> RowOrder | FusedRowOrder:
        """Order the rows of a map bool [T, m] over all experts or some, by kernels if the configuration says so."""
        fused_slots = None
        if self.config.moe_permute_fusion:
            num_columns = routing_map.shape[1]
            fused_slots = num_columns if self.is_padded else min(self.topk, num_columns)
        return build_row_order(routing_map, num_rows, rows_per_token, fused_slots, self.row_multiple)

    def padded_capacity(self, num_tokens: int, device: torch.device) -> int:
        """Rows that each rank sends to each expert padded to its capacity.

        Raises: ConfigError if the expert ranks bring different numbers of tokens, which is checked as in `agree_on`.
        """
        self.agree_on(num_tokens, device, require_equal_tokens)
        factor = self.config.moe_expert_capacity_factor
        assert factor is not None, "padding to capacity without a capacity factor"
        return min(expert_capacity(num_tokens * self.topk, self.num_experts, factor), num_tokens)

    def agree_on(self, num_tokens: int, device: torch.device, agree: Callable[[int, Any, torch.device], int]) -> int:
        """Ask the expert ranks about a number of tokens when it is first seen: `agree` is collective, and waits.

        A CPU group waits for every collective anyway, so there they are asked each time.
        """
        is_asked_again = device.type == "cpu" and step_guard.active() is None  # a guarded step reads nothing
        if num_tokens not in self._agreed_tokens or is_asked_again:
            self._agreed_tokens[num_tokens] = agree(num_tokens, self.expert_ranks_group, device)
        return self._agreed_tokens[num_tokens]

    @abc.abstractmethod
    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Hidden [T, h], map bool [T, E], probs [T, E] -> rows to send, their probabilities, the state."""

    @abc.abstractmethod
    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Communicate: rows [S, h] and probabilities -> what this rank received [S', h]."""

    @abc.abstractmethod
    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor, state: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Received rows [S', h] and probabilities -> rows [R, h] by expert, tokens_per_expert int64 [n], probs [R]."""

    @abc.abstractmethod
    def combine_preprocess(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Expert output [R, h] -> rows in the order of communication [S', h]."""

    @abc.abstractmethod
    def token_combine(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Communicate: rows [S', h] back to where they came from [S, h]."""

    @abc.abstractmethod
    def combine_postprocess(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Rows [S, h] -> hidden [T, h], the rows of each token added up in fp32 at least."""


def dispatcher_class(name: str, has_budget: bool = False) -> type[MoETokenDispatcher]:
    """Import the class behind a value of --moe-token-dispatcher-type, for use with a row budget or without."""
    if name not in DISPATCHERS:
        known = ", ".join(sorted(DISPATCHERS))
        raise ConfigError(f"moe_token_dispatcher_type={name!r}: not a dispatcher of this tree; choose one of {known}.")
    module, class_name = (DISPATCHERS_WITH_BUDGET if has_budget else DISPATCHERS).get(name, DISPATCHERS[name])
    return getattr(importlib.import_module(module), class_name)


def build_dispatcher(
    config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
) -> MoETokenDispatcher:
    """Build the dispatcher that the configuration names."""
    groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
    num_local = divide(config.num_moe_experts or 0, group_size(groups.ep))
    first = group_rank(groups.ep) * num_local
    has_budget = config.moe_expert_rank_capacity_factor is not None
    chosen = dispatcher_class(config.moe_token_dispatcher_type, has_budget)
    found = chosen.check(config)
    if found:
        raise ConfigError("\n".join(str(item) for item in found))
    return chosen(num_local, range(first, first + num_local), config, groups)


def __getattr__(name: str) -> Any:
    """Upstream's import path for the dispatcher classes."""
    for module, class_name in DISPATCHERS.values():
        if name == class_name:
            return getattr(importlib.import_module(module), class_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
