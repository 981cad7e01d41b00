"""What the rest of the tree must know of CUDA graphs: whether one is being captured, and how to end all of them.

A process group cannot be destroyed while a graph that captured one of its collectives exists: the destruction waits for
ever. Whoever leaves the process groups calls `destroy_graphs` first, on every way out.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class CapturedGraph(Protocol):
    """Something that holds a captured graph."""

    def destroy(self) -> None:
        """Drop the graph and everything that it keeps alive; a second call does nothing."""
        ...


class _Graphs:
    """The graphs of this process. Only weak references: a graph belongs to who made it."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self.is_capturing = False


_GRAPHS = _Graphs()


def register(graph: CapturedGraph) -> None:
    """Note a graph that must be destroyed before the process groups are."""
    _GRAPHS.alive.add(graph)


def num_graphs() -> int:
    """Graphs that have not been destroyed."""
    return len(_GRAPHS.alive)


def destroy_graphs() -> None:
    """Destroy every graph of this process."""
    for graph in list(_GRAPHS.alive):
        graph.destroy()
        _GRAPHS.alive.discard(graph)
    gc.collect()


def is_capturing() -> bool:
    """True while a step is being captured: what is done now happens on every replay, and not now."""
    return _GRAPHS.is_capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Mark a capture, with the garbage collector off: it could free a CUDA object, which a capture does not survive."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    _GRAPHS.is_capturing = True
    try:
        yield
    finally:
        _GRAPHS.is_capturing = False
        if was_enabled:
            gc.enable()


def reset() -> None:
    """Destroy all graphs and forget the rest."""
    destroy_graphs()
    _GRAPHS.is_capturing = False
