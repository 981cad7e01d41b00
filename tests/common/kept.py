"""Which tensors a forward pass leaves behind for backward, counted by shape.

    with watch_storages(x, *block.parameters()) as kept:
        output = block(x)
    kept() == Counter({(5, 2, 32): 3, ...})

A storage counts if an operator made it inside the block and it still lives when `kept()` is called; its shape is that
of its first tensor. Nothing is asked of autograd, so tensors that an autograd function hides in itself count as well.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Storages(TorchDispatchMode):
    """Notes every storage that an operator returns for the first time, and the shape it has then."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = [StorageWeakRef(tensor.untyped_storage()) for tensor in known]
        self.shapes: dict[int, tuple[StorageWeakRef, tuple[int, ...]]] = {ref.cdata: (ref, ()) for ref in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                ref = StorageWeakRef(leaf.untyped_storage())
                self.shapes.setdefault(ref.cdata, (ref, tuple(leaf.shape)))
        return result

    def alive(self) -> Counter[tuple[int, ...]]:
        """Shapes of those that live, without single numbers."""
        gc.collect()
        return Counter(shape for ref, shape in self.shapes.values() if shape and not ref.expired())


@contextmanager
def watch_storages(*known: torch.Tensor) -> Iterator[Callable[[], Counter[tuple[int, ...]]]]:
    """Yield a function that tells what lives of what was made in the block; `known` tensors [any] never count."""
    storages = _Storages(known)
    with storages:
        yield storages.alive
