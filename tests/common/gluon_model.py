"""Runs a Gluon kernel with specialised warps on the CPU, each group of warps in a thread: for what no interpreter does.

    shared memory     bytes that begin as NaN; a block lies in columns of 128 bytes, as TMA and the tensor cores see it
    TMA               copies a block, zeros where it leaves the tensor, and completes the bytes of a barrier
    barriers          a phase ends with the last arrival and the last byte; who waits for a parity is let through as on
                      the GPU, also by the wrong phase. A wait that lasts is a deadlock and raises
    tensor cores      products in flight are computed when they are waited for: a slot given back too early shows
    pointers, tiles   torch tensors

Not modelled: swizzles, layouts of registers, fences, widths of numbers.
"""

from __future__ import annotations

import threading
import types
from dataclasses import dataclass, field
from typing import Any

import torch

PATIENCE_SECONDS = 5
COLUMN_BYTES = 128


@dataclass
class Barrier:
    """One mbarrier."""

    arrivals: int = 0
    pending: int = 0
    num_bytes: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def init(self, count: int) -> None:
        self.arrivals = self.pending = count

    def note(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        """Count arrivals and expected (or, negative, completed) bytes."""
        with self.changed:
            self.pending -= arrivals
            self.num_bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier has"
            if self.pending == 0 and self.num_bytes == 0:
                self.phase, self.pending = self.phase + 1, self.arrivals
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE_SECONDS), "a wait without end"


class Barriers(list):
    """What shared memory of int64 is."""

    def index(self, number: int) -> Barrier:  # type: ignore[override]
        return self[number]


@dataclass
class Block:
    """A view of shared memory: `data` bytes, read as `shape` of `dtype`."""

    data: torch.Tensor
    dtype: torch.dtype
    shape: list[int]
    order: tuple[int, ...] | None = None

    @property
    def type(self) -> Block:
        return self

    def index(self, number: int) -> Block:
        size = len(self.data) // self.shape[0]
        assert 0 <= number < self.shape[0], "outside of shared memory"
        return Block(self.data[number * size : (number + 1) * size], self.dtype, self.shape[1:])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Block:
        wanted = as_torch(dtype)
        num_bytes = torch.Size(shape).numel() * wanted.itemsize
        assert num_bytes <= len(self.data), "a view larger than its memory"
        return Block(self.data[:num_bytes], wanted, list(shape))

    def permute(self, order: tuple[int, ...]) -> Block:
        return Block(self.data, self.dtype, self.shape, order)

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.data, self.dtype, list(shape))

    def load(self, layout: Any = None) -> torch.Tensor:
        columns = self._columns().permute(1, 0, 2).contiguous()
        value = columns.view(self.dtype).reshape(self.shape)
        return value if self.order is None else value.permute(self.order)

    def store(self, value: torch.Tensor) -> None:
        rows = value.contiguous().view(torch.uint8).reshape(self._columns().shape[1], -1, COLUMN_BYTES)
        self._columns().copy_(rows.permute(1, 0, 2))

    def _columns(self) -> torch.Tensor:
        num_columns = self.shape[-1] * self.dtype.itemsize // COLUMN_BYTES
        return self.data.view(num_columns, -1, COLUMN_BYTES)


@dataclass
class Pointer:
    """Into a tensor that lies in one piece."""

    base: torch.Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset - other)


@dataclass
class Number:
    """A type as kernels see it."""

    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize


@dataclass
class Descriptor:
    """What TMA knows of a tensor."""

    base: torch.Tensor
    sizes: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any = None

    @property
    def dtype(self) -> Number:
        return Number(self.base.dtype)

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(shape=self.block_shape)

    def read(self, place: list[int]) -> torch.Tensor:
        """A block, with zeros outside of the tensor."""
        axes = [torch.arange(size) + start for size, start in zip(self.block_shape, place, strict=True)]
        grid = torch.meshgrid(*axes, indexing="ij")
        inside = torch.ones(self.block_shape, dtype=torch.bool)
        offset = torch.zeros(self.block_shape, dtype=torch.long)
        for axis, size, stride in zip(grid, self.sizes, self.strides, strict=True):
            inside &= (axis >= 0) & (axis < size)
            offset += axis * stride
        spots = torch.where(inside, offset, 0)
        assert int(spots.max()) < self.base.numel(), "TMA reads behind the tensor"
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.base.dtype.itemsize]
        values = self.base.reshape(-1).view(bits)[spots]
        return torch.where(inside, values, 0).to(bits).view(self.base.dtype)


def as_torch(dtype: Any) -> torch.dtype:
    return dtype.torch if isinstance(dtype, Number) else dtype


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> Any:
    if not isinstance(pointer.offset, torch.Tensor):
        return int(pointer.base.reshape(-1)[pointer.offset]) if mask else other
    values = pointer.base.reshape(-1)[torch.where(mask, pointer.offset, 0)]
    return torch.where(mask, values, other)


def store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor, eviction_policy: str = "") -> None:
    pointer.base.view(-1)[pointer.offset[mask]] = value[mask]


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype is torch.int64:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Block(torch.full((torch.Size(shape).numel() * dtype.itemsize,), 255, dtype=torch.uint8), dtype, list(shape))


def copy_block(desc: Descriptor, place: list[int], barrier: Barrier, block: Block) -> None:
    assert block.dtype is desc.base.dtype, f"a block of {block.dtype} for {desc.base.dtype}"
    assert list(block.shape) == list(desc.block_shape), f"a block {block.shape} for {desc.block_shape}"
    block.store(desc.read(place))
    barrier.note(num_bytes=-len(block.data))


_flight = threading.local()


def multiply(left: Block, right: Block, total: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Any:
    """Note a product; the sum is computed in place when it is waited for."""
    result = total.clone() if use_acc else torch.zeros_like(total)
    if use_acc and any(pending[0] is total for pending in _products()):
        result = total  # goes on in the same registers
    _products().append((result, left, right))
    return result


def _products() -> list[tuple[torch.Tensor, Block, Block]]:
    if not hasattr(_flight, "products"):
        _flight.products = []
    return _flight.products


def wait_for_products(num_outstanding: int, deps: list[torch.Tensor]) -> Any:
    products = _products()
    while len(products) > num_outstanding:
        result, left, right = products.pop(0)
        result += left.load().float() @ right.load().float()
    return deps[0] if len(deps) == 1 else tuple(deps)


def specialise(parts: list[tuple[Any, tuple[Any, ...]]], num_warps: list[int], registers: list[int]) -> None:
    errors: list[BaseException] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  told by the thread that waits
            errors.append(error)

    assert len(num_warps) == len(registers) == len(parts) - 1
    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def language(program: int) -> Any:
    """Stands for `gl`, as one program sees it."""
    return types.SimpleNamespace(
        float32=torch.float32,
        int64=torch.int64,
        program_id=lambda axis: program,
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        static_range=range,
        arange=lambda begin, end, layout: torch.arange(begin, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        cast=lambda value, dtype: value,
        load=load,
        store=store,
        allocate_shared_memory=allocate,
        warp_specialize=specialise,
        SliceLayout=lambda *words: None,
        NVMMASharedLayout=lambda *words, **named: None,
        NVMMADistributedLayout=lambda *words: None,
    )


HOPPER = types.SimpleNamespace(
    mbarrier=types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, num_bytes: barrier.note(1, num_bytes),
        arrive=lambda barrier, pred=True: barrier.note(1) if pred else None,
        wait=lambda barrier, parity: barrier.wait(parity),
    ),
    tma=types.SimpleNamespace(async_copy_global_to_shared=copy_block),
    fence_async_shared=lambda: None,
    warpgroup_mma=multiply,
    warpgroup_mma_wait=wait_for_products,
)


def run_kernel(module: types.ModuleType, name: str, num_programs: int, *args: Any, **constants: Any) -> None:
    """Run a kernel of a module and the kernels that it calls, one program after the other."""
    for program in range(num_programs):
        names: dict[str, Any] = {**vars(module), "gl": language(program), "hopper": HOPPER}
        for key, value in vars(module).items():
            if hasattr(value, "fn"):  # a Gluon kernel around a Python function
                names[key] = types.FunctionType(value.fn.__code__, names, key, value.fn.__defaults__)
        names[name](*args, **constants)
