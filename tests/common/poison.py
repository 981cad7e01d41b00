"""Makes every read of memory that was never written show up, each time and not once in a thousand runs.

    with fresh_memory_poison():
        step()                    # what `empty` and its kin return is NaN, or the largest integer
    assert_finite("loss", loss)

The filling does not reach memory that a kernel library takes for itself; for that, `poison_free_blocks` leaves 0xFF
bytes in blocks of the sizes that it will take next. 0xFF is NaN in every float format and -1 in signed integers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fresh_memory_poison() -> Iterator[None]:
    """Fill uninitialised tensors with NaN, or the largest value of an integer type, inside the block."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]


def fill_with_poison(tensor: torch.Tensor) -> None:
    """Write 0xFF over the whole storage of `tensor`, behind the back of autograd's version counter."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(0xFF)


def poison_free_blocks(sizes_bytes: Iterable[int], device: torch.device | str = "cpu", copies: int = 4) -> None:
    """Allocate, poison and free blocks of the given sizes, so that the allocator hands them out next."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes_bytes for _ in range(copies)]
    for block in blocks:
        block.fill_(0xFF)


def assert_finite(name: str, tensor: torch.Tensor) -> None:
    """Fail with the name and the first places of `tensor` that are NaN or infinite."""
    bad = (~torch.isfinite(tensor)).nonzero()
    assert len(bad) == 0, f"{name} {tuple(tensor.shape)}: {len(bad)} elements not finite, first at {bad[:3].tolist()}"


def assert_in_range(name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """Fail if an integer of `tensor` lies outside low .. high; NaN does not survive in counts and indices."""
    bad = ((tensor < low) | (tensor > high)).nonzero()
    assert len(bad) == 0, f"{name}: {len(bad)} values outside {low} .. {high}, first at {bad[:3].tolist()}"
