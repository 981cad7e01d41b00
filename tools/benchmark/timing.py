"""Times of calls on a GPU by events, variants interleaved: one by one, or from replays, whose launches cost no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3


def nothing() -> None:
    """The fence of a single process."""


def graph_of(call: Callable[[], Any], num_calls: int, fence: Callable[[], None] = nothing) -> torch.cuda.CUDAGraph:
    """A graph of several calls, after one call outside of it."""
    call()
    torch.cuda.synchronize()
    fence()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    return graph


def time_in_turn(
    calls: dict[str, Callable[[], Any]], repeats: int, fence: Callable[[], None] = nothing
) -> dict[str, list[float]]:
    """Milliseconds of every call; the first rounds do not count. `fence` runs before each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(WARM_UPS + repeats):
        for name, call in calls.items():
            fence()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if round_number >= WARM_UPS:
                times[name].append(start.elapsed_time(end))
    return times


def time_replays(
    calls: dict[str, Callable[[], Any]], num_calls: int, repeats: int, fence: Callable[[], None] = nothing
) -> dict[str, list[float]]:
    """Microseconds of every call, from replays of graphs with `num_calls` of them each."""
    graphs = {name: graph_of(call, num_calls, fence) for name, call in calls.items()}
    times = time_in_turn({name: graph.replay for name, graph in graphs.items()}, repeats, fence)
    return {name: [1000 * ms / num_calls for ms in found] for name, found in times.items()}
