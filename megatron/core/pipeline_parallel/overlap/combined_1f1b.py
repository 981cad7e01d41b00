"""The forward of one microbatch beside the backward of another, layer by layer.

Forward layer i goes with backward layer L - 1 - i. Enqueued from top to bottom (f forward, b backward, w weight
gradients); what stands in one line runs at the same time:

    compute                          comm
    b post
    f pre_dispatch                   b combine
    b experts                        f dispatch
    w post, w experts                b dispatch
    f experts                        b dispatch
    b pre_dispatch, w pre_dispatch   f combine
    f post

A layer that is recomputed (r) runs again before its backward: `r pre_dispatch` before `b post`, `r dispatch` before
`b combine`, `r experts` before `b experts`.

In a pipeline the `w pre_dispatch` of the layer that backward comes to last is left out here: it runs when the gradient
of the chunk's input is on its way, as an action of its own (W).
"""

from collections.abc import Sequence
from typing import Literal

import torch

from megatron.core.pipeline_parallel.overlap.chunk_plan import ChunkPlan
from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan
from megatron.core.pipeline_parallel.overlap.protocol import Stage

Step = tuple[Literal["f", "r", "b", "w"], Stage]

PAIR_ORDER: tuple[Step, ...] = (
    ("r", Stage.PRE_DISPATCH),
    ("r", Stage.DISPATCH),
    ("r", Stage.POST),
    ("b", Stage.POST),
    ("b", Stage.COMBINE),
    ("f", Stage.PRE_DISPATCH),
    ("r", Stage.EXPERTS),
    ("b", Stage.EXPERTS),
    ("f", Stage.DISPATCH),
    ("w", Stage.POST),
    ("w", Stage.EXPERTS),
    ("b", Stage.DISPATCH),
    ("f", Stage.EXPERTS),
    ("f", Stage.COMBINE),
    ("b", Stage.PRE_DISPATCH),
    ("w", Stage.PRE_DISPATCH),
    ("f", Stage.POST),
)


def early_release(order: Sequence[Step]) -> tuple[Step, ...]:
    """Move the backward of attention before the forward of the experts, which then allocate what it frees."""
    moved = ("b", Stage.PRE_DISPATCH)
    rest = [step for step in order if step != moved]
    rest.insert(rest.index(("f", Stage.EXPERTS)), moved)
    return tuple(rest)


def run_pair(
    forward: ChunkPlan | None,
    backward: ChunkPlan | None,
    received: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run one forward and one backward, or either alone, and interleave them.

    `received` [s, b, h] is what the forward chunk was sent, `grad` the gradient of what the backward chunk returned;
    returned are the forward's output and the gradient of what the backward chunk had received.
    """
    if forward is not None:
        forward.begin(received)
    if backward is not None:
        assert grad is not None, f"{backward.name}: backward without a gradient"
        backward.begin_backward(grad)
    num_forward = 0 if forward is None else len(forward.layers)
    num_backward = 0 if backward is None else len(backward.layers)
    for i in range(max(num_forward, num_backward)):
        _run_layers(
            forward if i < num_forward else None, i, backward if i < num_backward else None, num_backward - 1 - i
        )
    output = None if forward is None else forward.end()
    input_grad = None if backward is None else backward.end_backward()
    return output, input_grad


def _run_layers(forward: ChunkPlan | None, i: int, backward: ChunkPlan | None, j: int) -> None:
    """Interleave forward layer `i` with backward layer `j`; stages that a layer does not have are left out."""
    f = None if forward is None else forward.enter_layer(i)
    b = None if backward is None else backward.enter_layer(j)
    for layer, other in ((f, b), (b, f)):
        if layer is not None:
            layer.is_beside_exchange = other is not None and Stage.DISPATCH in other.stages
    settings = (forward or backward).settings  # type: ignore[union-attr]
    for kind, stage in early_release(PAIR_ORDER) if settings.releases_attention_early else PAIR_ORDER:
        _run_step(kind, stage, f if kind == "f" else b)
    if forward is not None:
        forward.leave_layer(i)
    if backward is not None:
        backward.leave_layer(j)


def _run_step(kind: str, stage: Stage, layer: LayerPlan | None) -> None:
    if layer is None or stage not in (layer.recomputed if kind == "r" else layer.stages):
        return
    {"f": layer.forward, "r": layer.recompute, "b": layer.backward, "w": layer.weight_grads}[kind](stage)
