"""One pass of one microbatch through one layer, stage by stage, forward and backward.

What goes from stage to stage, by name; backward takes the same way back with gradients:

    hidden -> PRE_DISPATCH -> rows, probs, residual, shared
       rows, probs -> DISPATCH -> rows, probs -> EXPERTS -> rows -> COMBINE -> rows
                                             rows, residual, shared -> POST -> hidden

A layer that is recomputed keeps its input and its routing. Its stages up to the experts, of a dense layer all, run once
without a graph and once more, by `recompute`, before their backward. Combine and what follows run once: autograd keeps
nothing large of them, so that only the dispatch is communicated twice.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron.core import streams
from megatron.core.deferred_wgrad import WgradQueue
from megatron.core.pipeline_parallel.overlap.nodes import Handed, StageNode
from megatron.core.pipeline_parallel.overlap.protocol import LayerCall, OverlapLayer, SavedRouting, Stage
from megatron.core.streams import Role
from megatron.core.tensor_parallel.random import DeviceRngState, get_cuda_rng_tracker, replayed
from megatron.core.utils.sm_reservation import leaving_sms_free

_INPUTS = {
    Stage.PRE_DISPATCH: ("hidden",),
    Stage.DISPATCH: ("rows", "probs"),
    Stage.EXPERTS: ("rows", "probs"),
    Stage.COMBINE: ("rows",),
    Stage.POST: ("rows", "residual", "shared"),
}
_OUTPUTS = {
    Stage.PRE_DISPATCH: ("rows", "probs", "residual", "shared"),
    Stage.DISPATCH: ("rows", "probs"),
    Stage.EXPERTS: ("rows",),
    Stage.COMBINE: ("rows",),
    Stage.POST: ("hidden",),
}

EXCHANGE_STAGES = tuple(Stage)
DENSE_STAGES = (Stage.PRE_DISPATCH, Stage.POST)
_RECOMPUTED_STAGES = (Stage.PRE_DISPATCH, Stage.DISPATCH, Stage.EXPERTS)


@dataclasses.dataclass
class PlanSettings:
    """What all plans of a step share."""

    delays_wgrad: bool = False
    """Put weight gradients off until the schedule asks for them."""
    releases_attention_early: bool = False
    """Run the backward of attention before the experts of the other microbatch: less memory, less cover."""
    draws: bool = False
    """The layers draw random numbers in forward."""
    num_comm_sms: int = 0
    """Multiprocessors that the products of the experts leave to the exchange beside them."""
    counters: Counter[str] = dataclasses.field(default_factory=Counter)
    """What happened how often."""


class LayerPlan:
    """The stages of one layer for one microbatch.

    Args:
        layer: The layer.
        call: The record of this pass; it lives until the layer's last product has run.
        name: Names microbatch and layer in reports.
        settings: What all plans share.
        is_recomputed: Keep only the input, and run the layer once more before its backward.
        leaves_wgrads: Leave the weight gradients of the first stage, where backward ends, to `finish_weight_grads`.
    """

    def __init__(
        self,
        layer: OverlapLayer,
        call: LayerCall,
        name: str,
        settings: PlanSettings,
        is_recomputed: bool = False,
        leaves_wgrads: bool = False,
    ) -> None:
        self.call, self.name, self.settings, self.leaves_wgrads = call, name, settings, leaves_wgrads
        self.is_beside_exchange = False
        """The layer of another microbatch that runs beside this one has an exchange; set by the schedule."""
        self.stages = EXCHANGE_STAGES if layer.has_exchange else DENSE_STAGES
        self.recomputed: tuple[Stage, ...] = ()
        if is_recomputed:
            self.recomputed = _RECOMPUTED_STAGES if layer.has_exchange else DENSE_STAGES
            call.routing = SavedRouting()
        self._again: dict[str, Handed | None] = {}
        self._random_states: dict[Stage, DeviceRngState] = {}
        self._values: dict[str, Handed | None] = {}
        self._nodes: dict[Stage, StageNode] = {}
        self._metadata: dict[int, tuple[torch.Tensor, Role]] = {}
        saved = layer.saved_inputs()
        for stage in self.stages:
            keeps = {i for i, name in enumerate(_INPUTS[stage]) if (stage, name) in saved}
            defers = settings.delays_wgrad and stage.role is Role.COMPUTE
            queue = WgradQueue() if defers else None
            self._nodes[stage] = StageNode(
                f"{name} {stage.value}", stage.role, _run_of(layer, stage, call), keeps, queue
            )

    @property
    def hidden(self) -> Handed:
        """Hidden states [s, b, h] between two layers, or their gradient; taken once."""
        hidden = self._values.pop("hidden")
        assert hidden is not None, "the last stage gave no hidden states"
        assert not self._values, f"between two layers there are {sorted(self._values)} as well"
        return hidden

    @hidden.setter
    def hidden(self, value: Handed) -> None:
        self._values["hidden"] = value

    def forward(self, stage: Stage) -> None:
        """Run one stage."""
        is_kept = stage not in self.recomputed
        if not is_kept and stage is Stage.PRE_DISPATCH:
            self._again["hidden"] = self._values["hidden"]
        if not is_kept and self.settings.draws:
            self._random_states[stage] = DeviceRngState(get_cuda_rng_tracker().device)
        self._run_forward(stage, self._values, is_kept)

    def recompute(self, stage: Stage) -> None:
        """Run one stage once more, for its backward: same inputs, routing and random numbers."""
        state = self._random_states.pop(stage, None)
        with nullcontext() if state is None else replayed(state):
            self._run_forward(stage, self._again, is_kept=True)
        if stage is self.recomputed[-1]:
            self._again.clear()
        self.settings.counters["stages recomputed"] += 1

    def _run_forward(self, stage: Stage, values: dict[str, Handed | None], is_kept: bool) -> None:
        inputs = [values.pop(name, None) for name in _INPUTS[stage]]
        with self._beside_exchange(stage):
            results = self._nodes[stage].forward(*inputs, is_kept=is_kept)
        _update(values, _OUTPUTS[stage], results)
        for tensor in _tensors_in(self.call.dispatch_state):
            self._metadata.setdefault(id(tensor), (tensor, stage.role))
        self._count(stage)

    def backward(self, stage: Stage) -> None:
        """Run one stage backward; its weight gradients too, unless they are delayed."""
        grads = [self._values.pop(name, None) for name in _OUTPUTS[stage]]
        with self._beside_exchange(stage):
            results = self._nodes[stage].backward(*grads)
        _update(self._values, _INPUTS[stage], results)
        self._count(stage)

    def _beside_exchange(self, stage: Stage) -> AbstractContextManager[None]:
        """Leave room on a device if these are experts beside the exchange of another microbatch."""
        is_shared = (
            stage is Stage.EXPERTS and self.is_beside_exchange and streams.native_stream(Role.COMPUTE) is not None
        )
        return leaving_sms_free(self.settings.num_comm_sms if is_shared else 0)

    def _count(self, stage: Stage) -> None:
        if stage.role is Role.COMM:
            self.settings.counters["stages on the comm stream"] += 1

    def weight_grads(self, stage: Stage) -> None:
        """Compute the delayed weight gradients of one stage."""
        if not (self.leaves_wgrads and stage is Stage.PRE_DISPATCH):
            self._weight_grads(stage)

    def finish_weight_grads(self) -> int:
        """Compute those that were left; returns the number of products."""
        return self._weight_grads(Stage.PRE_DISPATCH)

    def _weight_grads(self, stage: Stage) -> int:
        with self._beside_exchange(stage):
            num_products = self._nodes[stage].weight_grads()
        self.settings.counters["wgrads deferred"] += num_products
        return num_products

    def close(self) -> None:
        """Drop the metadata of the microbatch: both streams have been given their last use of it.

        It is made on one stream and may be read on the other.
        """
        for owner in Role:
            with streams.on(owner.other, f"drop of {self.name}"):
                for tensor, role in self._metadata.values():
                    if role is owner:
                        streams.hold(tensor, owner)
        self._metadata, self.call.dispatch_state, self.call.routing = {}, None, None
        self._nodes.clear()


def _update(values: dict[str, Handed | None], names: Sequence[str], results: Sequence[Handed | None]) -> None:
    """Enter results under their names, those that are there."""
    values.update({name: value for name, value in zip(names, results, strict=True) if value is not None})


def _run_of(layer: OverlapLayer, stage: Stage, call: LayerCall) -> Callable[..., Sequence[torch.Tensor | None]]:
    """Return the layer's function for a stage, with its results in a sequence."""

    def run(*inputs: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        outputs = getattr(layer, stage.value)(*inputs, call)
        return (outputs,) if isinstance(outputs, torch.Tensor) else outputs

    return run


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state, through dataclasses, sequences and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
