"""1F1B: after a short run-up every rank alternates, so that few microbatches are in flight.

    rank 0   F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 B3 ...
    rank 3            F0 B0 F1 B1 F2 B2 ...

Rank r of p begins with p - r - 1 forwards and holds at most p - r microbatches.
"""

from megatron.core.pipeline_parallel.actions import Action, PlanShape, backward, forward


def one_f_one_b(shape: PlanShape) -> list[Action]:
    """List the forwards and backwards of one rank."""
    assert shape.num_chunks == 1, f"1F1B runs one chunk on each rank, got {shape}"
    forwards = [forward(0, i) for i in range(shape.num_microbatches)]
    if shape.forward_only:
        return forwards
    return alternate(forwards, [backward(0, f.microbatch) for f in forwards], warmup=shape.pp_size - shape.pp_rank - 1)


def peak_in_flight(shape: PlanShape) -> int:
    """Microbatches whose activations one rank holds at the same time, at most."""
    return min(shape.num_microbatches, shape.pp_size - shape.pp_rank)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    pairs = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + pairs + backwards[len(forwards) - warmup :]
