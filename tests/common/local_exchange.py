"""An exchange on one rank, so that the combined schedule has something to hide without a second process.

    use_local_exchange(model)       every MoE layer copies its rows where ranks would exchange them, there and back

The copies run on the stream that the schedule chose, forward and backward. `delay` enqueues work in front of each, for
tests that want the communication to be late.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.transformer.moe.dispatchers.alltoall import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.permute import RowShuffle

Delay = Callable[[], None]


class LocalExchangeDispatcher(MoEAlltoAllTokenDispatcher):
    """All experts on this rank, with copies in place of communication.

    `is_shuffled` sorts the rows on arrival, as several experts on several ranks need it; otherwise the experts are
    given the received rows themselves. With `counts_late` the row counts arrive with the rows, on the stream of the
    exchange, as those of a fused dispatch do.
    """

    is_shuffled = False
    counts_late = False
    delay: Delay | None = None

    @property
    def _is_sorted_on_arrival(self) -> bool:
        return not self.is_shuffled

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        rows, row_probs, state = super().dispatch_preprocess(hidden_states, routing_map, probs)
        if self.is_shuffled:
            ids = torch.arange(rows.shape[0], device=rows.device)
            state.shuffle = RowShuffle(ids, ids.clone())
        return rows, row_probs, state

    def token_dispatch(self, rows, probs, state):
        if self.counts_late:
            state.tokens_per_expert = state.counts.tokens_per_expert.clone()
        return _Copy.apply(rows, self.delay), _Copy.apply(probs, None)

    def dispatch_postprocess(self, rows, probs, state):
        rows, counts, probs = super().dispatch_postprocess(rows, probs, state)
        return rows, state.tokens_per_expert if self.counts_late else counts, probs

    def token_combine(self, rows, state):
        return _Copy.apply(rows, self.delay)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, delay: Delay | None) -> torch.Tensor:
        ctx.delay = delay
        return _copy(rows, delay)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copy(grad, ctx.delay), None


def _copy(rows: torch.Tensor, delay: Delay | None) -> torch.Tensor:
    if delay is not None:
        delay()
    return rows.clone()


def use_local_exchange(
    model: torch.nn.Module, is_shuffled: bool = False, counts_late: bool = False, delay: Delay | None = None
) -> None:
    """Let all MoE layers below `model` exchange with themselves."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            old = layer.token_dispatcher
            dispatcher = LocalExchangeDispatcher(old.num_local_experts, old.local_expert_indices, old.config)
            dispatcher.is_shuffled, dispatcher.counts_late, dispatcher.delay = is_shuffled, counts_late, delay
            layer.token_dispatcher = dispatcher
