"""What a rank holds of a global tensor: the only currency between the model, the optimizer and the files.

A checkpoint knows nothing of layouts. Each rank lists boxes of global tensors; a save writes every distinct box once,
a load fills the boxes that the present layout asks for. Both name a tensor by its key: any layout reads any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron.core.errors import CheckpointError


@dataclass(frozen=True)
class ShardedTensor:
    """A box of one global tensor.

    Shapes: `data` has the shape of the box without its leading one-wide axes: a [h, f] weight of layer 3 of 8 that is
            stored in a stacked tensor has `global_shape` [8, h, f] and `global_offset` (3, 0, 0).
    """

    key: str
    """name of the global tensor in the files"""
    data: Tensor
    """local values; a load writes into them in place"""
    global_shape: tuple[int, ...]
    """shape of the whole tensor"""
    global_offset: tuple[int, ...]
    """where the box begins, one number per global axis"""
    num_needed_rows: int | None = None
    """set for a tensor whose last rows are filler: files with another number of rows, this many at least, fit too;
    rows that they lack keep their values"""

    def __post_init__(self) -> None:
        lead = len(self.global_shape) - self.data.dim()
        shape = self.local_shape
        inside = all(
            o >= 0 and o + s <= g for o, s, g in zip(self.global_offset, shape, self.global_shape, strict=True)
        )
        if lead < 0 or not inside:
            raise CheckpointError(
                f"{self.key}: a box of {list(self.data.shape)} at {list(self.global_offset)} does not fit into "
                f"{list(self.global_shape)}"
            )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the box in global axes: the leading stacked axes are one wide."""
        return (1,) * (len(self.global_shape) - self.data.dim()) + tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return prod(self.local_shape) * self.data.element_size()

    def view(self) -> Tensor:
        """The local values in global axes, sharing memory with `data`."""
        lead = len(self.global_shape) - self.data.dim()
        return self.data.detach()[(None,) * lead] if lead else self.data.detach()


def replicated(key: str, data: Tensor) -> ShardedTensor:
    """A tensor that every rank holds whole; it is written once.

    Shapes: `data` of any shape [...].
    """
    return ShardedTensor(key, data, tuple(data.shape), (0,) * data.dim())
