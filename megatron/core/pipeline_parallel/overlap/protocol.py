"""A transformer layer as stages, and the record that travels through them.

    hidden -> pre_dispatch -> dispatch -> experts -> combine -> post -> hidden
              compute         comm        compute    comm       compute

`dispatch` and `combine` communicate and do nothing else. A layer without exchange (dense MLP) is `pre_dispatch` and
`post`. Differentiable tensors are passed from stage to stage explicitly. What has no gradient and belongs to one
microbatch is in its `LayerCall`, never on the layer: two microbatches may be inside one layer at the same time.

Legend: s sequence, b batch, h width, R rows at the experts of this rank.
"""

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from megatron.core.fusions.fused_rope import RotaryTables
from megatron.core.streams import Role


class Stage(enum.Enum):
    """The stages of a layer, in the order of forward."""

    PRE_DISPATCH = "pre_dispatch"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"
    POST = "post"

    @property
    def role(self) -> Role:
        """The stream that the stage runs on."""
        return Role.COMM if self in (Stage.DISPATCH, Stage.COMBINE) else Role.COMPUTE


SavedInput = tuple[Stage, str]
"""An input of a stage, `rows` or `probs`, that autograd keeps for backward."""


@dataclass
class SavedRouting:
    """The choice of a router, kept for the second pass of a recomputed layer.

    Scores that tie may be ranked differently when they are computed again, and then nothing would fit together.
    """

    indices: torch.Tensor | None = None
    """Expert ids int64 [T, k], best first; None before the first pass."""

    routing_map: torch.Tensor | None = None
    """bool [T, E] after a capacity was applied; None without one."""


@dataclass
class LayerCall:
    """One pass of one microbatch through one layer."""

    attention_mask: torch.Tensor | None = None
    """bool, broadcastable to [b, 1, s, s], True = masked; None leaves the mask to the attention's own type."""

    rotary: RotaryTables | None = None
    """Rotary tables, or None without rotary embedding."""

    padding_mask: torch.Tensor | None = None
    """bool [b, s], True = padding, for the statistics of the router."""

    routing: SavedRouting | None = None
    """Filled by the first pass of a layer that is recomputed, used by the second; None if it runs once."""

    dispatch_state: Any = None
    """The dispatcher's state, set by `pre_dispatch` and read by the stages after it."""


class DispatchInputs(NamedTuple):
    """What `pre_dispatch` hands on."""

    rows: torch.Tensor
    """Rows to be sent [rows, h]; in a layer without exchange the normalised hidden states [s, b, h]."""

    probs: torch.Tensor | None
    """Routing probability of each row [rows]; None without exchange."""

    residual: torch.Tensor
    """Residual stream before the MLP [s, b, h], read by `post`."""

    shared_output: torch.Tensor | None
    """Output of the shared experts [s, b, h], read by `post`."""


class OverlapLayer(Protocol):
    """A layer that a schedule can run stage by stage; its `forward` runs the same stages in line."""

    @property
    def has_exchange(self) -> bool:
        """True if the layer has the stages `dispatch`, `experts` and `combine`."""
        ...

    def saved_inputs(self) -> frozenset[SavedInput]:
        """Inputs of stages that autograd keeps for backward, in the precision in which this very layer runs.

        All others are dropped after the stage, as soon as streams allow it. A test compares the declaration with
        what autograd saved.
        """
        ...

    def pre_dispatch(self, hidden_states: torch.Tensor, call: LayerCall) -> DispatchInputs:
        """Attention, norm, router, shared experts, local preparation: [s, b, h] -> `DispatchInputs`."""
        ...

    def dispatch(self, rows: torch.Tensor, probs: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows [rows, h] and probabilities [rows] to their experts: [R, h], [R]."""
        ...

    def experts(self, rows: torch.Tensor, probs: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Run the experts of this rank: [R, h], [R] -> [R, h]."""
        ...

    def combine(self, rows: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Send rows [R, h] back to the ranks they came from: [rows, h]."""
        ...

    def post(
        self, rows: torch.Tensor, residual: torch.Tensor, shared_output: torch.Tensor | None, call: LayerCall
    ) -> torch.Tensor:
        """Add up: rows [rows, h] (or [s, b, h]), residual [s, b, h], shared_output [s, b, h] -> [s, b, h]."""
        ...


@runtime_checkable
class ExchangingMLP(Protocol):
    """An MLP that exchanges tokens between ranks, cut at its communication; `MoELayer` is one.

    Each part takes what the stage of the same name takes; `state` is the dispatcher's state of this microbatch.
    """

    def saved_inputs(self) -> frozenset[SavedInput]:
        """Inputs that autograd keeps, see `OverlapLayer.saved_inputs`."""
        ...

    def route_and_preprocess(
        self,
        hidden: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        routing: SavedRouting | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]:
        """[s, b, h], padding_mask bool [b, s] -> rows [rows, h], probs [rows], shared output [s, b, h], state."""
        ...

    def dispatch(self, rows: torch.Tensor, probs: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [rows, h], probs [rows] -> [R, h], [R]."""
        ...

    def experts_compute(self, rows: torch.Tensor, probs: torch.Tensor, state: Any) -> torch.Tensor:
        """Rows [R, h], probs [R] -> [R, h]."""
        ...

    def combine(self, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Rows [R, h] -> [rows, h]."""
        ...

    def postprocess(self, rows: torch.Tensor, shared_output: torch.Tensor | None, state: Any) -> torch.Tensor:
        """Rows [rows, h], shared output [s, b, h] -> [s, b, h]."""
        ...


@dataclass(frozen=True)
class ModelStages:
    """One call of a model chunk, cut into what a schedule runs piece by piece."""

    embed: Callable[[], torch.Tensor] | None
    """Makes the hidden states [s, b, h]; None in a chunk that is given them."""

    layers: Sequence[OverlapLayer]
    """The layers in order."""

    layer_call: Callable[[torch.Tensor], LayerCall]
    """Makes the record of one layer's pass from the chunk's first hidden states [s, b, h]."""

    finish: Callable[[torch.Tensor], torch.Tensor]
    """What follows the layers: hidden states [s, b, h] -> the output of the chunk."""

    recomputed_layers: Collection[int] = ()
    """Positions of the layers that keep their input alone and run once more before their backward."""

    tied_weight: torch.nn.Parameter | None = None
    """The matrix that `embed` and `finish` share, if they do."""


@runtime_checkable
class StagedModel(Protocol):
    """A model chunk that a schedule can run in stages."""

    def build_schedule_plan(self, *args: Any, **kwargs: Any) -> ModelStages:
        """Take what the model's forward takes and compute nothing yet."""
        ...
