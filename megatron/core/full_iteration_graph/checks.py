"""The stand-in for a capture on a CPU: runs a step and rejects what a capture could not record.

A captured step is the same list of kernels on the same addresses, whatever the numbers are. So, watching every
operation of forward and backward, `CheckedRecording` raises `CaptureViolation`, with the file and line, for

- a host read: item, tolist, numpy, cpu, bool, int, float, a printed tensor;
- a tensor made from numbers of the host (`torch.tensor`), which a GPU would have to copy;
- a shape that depends on numbers: nonzero, masked_select, a boolean index, unique, repeat_interleave by a tensor;
- in a later run another operation, another order or another shape than in the recorded one;
- in a later run an input at another address: a tensor that was made anew outside of the step, or freed meanwhile.

A checked replay computes: it is a step, only slower.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = frozenset(
    {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__"}
)
_aten = torch.ops.aten
DATA_DEPENDENT = frozenset(
    {
        _aten._local_scalar_dense,
        _aten.is_nonzero,
        _aten.equal,
        _aten.nonzero,
        _aten.masked_select,
        _aten.unique_dim,
        _aten.unique_consecutive,
        _aten._unique2,
        _aten.bincount,
    }
)
_INDEXING = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_QUIET = ("/torch/", "/full_iteration_graph/checks.py", "/contextlib.py")
"""Frames that are not where a mistake was made."""


_COLLECTIVES = "/core/utils/collectives.py"


class CaptureViolation(RuntimeError):
    """Something that a capture could not record."""


def _place() -> str:
    """File and line of the innermost frame outside of torch and of this file."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in _QUIET) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_in_collective() -> bool:
    """True inside a collective, whose CPU form copies through memory that no operation is seen to make."""
    return _place().rpartition(":")[0].endswith(_COLLECTIVES)


@contextmanager
def _host_reads_refused() -> Iterator[None]:
    """Let every method fail by which the host learns numbers of a tensor, in backward too, where no mode sees them."""
    originals = {name: vars(torch.Tensor).get(name) for name in HOST_READS}

    def refuse(name: str) -> Callable[..., Any]:
        def refused(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise CaptureViolation(f"{_place()}: the host reads a tensor by {name}; a captured step cannot wait for it")

        return refused

    for name in HOST_READS:
        setattr(torch.Tensor, name, refuse(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            if original is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)


@dataclass(frozen=True)
class Operation:
    """One recorded operation."""

    name: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each tensor argument"""
    addresses: tuple[int | None, ...]
    """where those lie that the step did not make itself"""
    place: str = field(compare=False)


class _Recorder(TorchDispatchMode):
    """Notes every operation below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._is_waiting = False
        self._own: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages made inside, by address; not kept alive, so that the step frees what it frees without a watch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._refuse_data_dependence(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        operation = Operation(
            str(func),
            tuple((str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors),
            tuple(self._outer_address(tensor) for tensor in tensors),
            _place(),
        )
        self.operations.append(operation)
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                storage = leaf.untyped_storage()
                self._own[storage.data_ptr()] = weakref.ref(storage)
        return result

    def _outer_address(self, tensor: torch.Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        own = self._own.get(address)
        is_made_inside = own is not None and own() is not None
        is_known = is_made_inside or tensor.numel() == 0 or self._is_waiting or _is_in_collective()
        return None if is_known else tensor.data_ptr()

    @contextmanager
    def noting_waits(self) -> Iterator[None]:
        """Know when a collective is waited for: its CPU form takes the result apart then, as within the collective."""
        wait = dist.Work.wait

        def noted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            self._is_waiting = True
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._is_waiting = False

        dist.Work.wait = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]

    def _refuse_data_dependence(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        packet = getattr(func, "overloadpacket", None)
        is_mask = packet in _INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(args[1])
        )
        is_spread = func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None and len(args) < 2
        if packet is _aten.lift_fresh:
            raise CaptureViolation(
                f"{_place()}: a tensor is made from numbers of the host; make it before the step, or use torch.full"
            )
        if packet in DATA_DEPENDENT or is_mask or is_spread:
            what = "an index by a boolean mask" if is_mask else str(packet)
            raise CaptureViolation(
                f"{_place()}: {what}: its size depends on numbers that a captured step does not know; use a form with "
                "a size of its own (where, gather, nonzero_static, output_size)"
            )


class CheckedRecording:
    """Runs a step under watch; the second and later runs must repeat the first one operation by operation."""

    def __init__(self) -> None:
        self._call: Callable[[], torch.Tensor] | None = None
        self._operations: list[Operation] = []
        self._outputs: torch.Tensor | None = None

    def record(self, call: Callable[[], torch.Tensor]) -> None:
        """Take note of `call`; as in a capture nothing is computed."""
        self._call = call

    def repeat(self) -> torch.Tensor:
        """Run the step; its result [n] lies at the same address each time."""
        assert self._call is not None, "a replay before the capture, or after destroy()"
        recorder = _Recorder()
        with _host_reads_refused(), recorder.noting_waits(), recorder:
            outputs = self._call()
        if self._outputs is None:
            self._operations, self._outputs = recorder.operations, outputs.detach().clone()
        compare(self._operations, recorder.operations)
        return self._outputs.copy_(outputs)

    def destroy(self) -> None:
        """Forget the step."""
        self._call = self._outputs = None


def compare(before: list[Operation], now: list[Operation]) -> None:
    """Raise `CaptureViolation` at the first operation that differs."""
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if old.name != new.name or old.inputs != new.inputs:
            raise CaptureViolation(
                f"{new.place}: operation {number} is {new.name} of {_shapes(new)}, recorded was {old.name} of "
                f"{_shapes(old)} at {old.place}; a captured step does the same whatever the numbers are"
            )
        if old.addresses != new.addresses:
            raise CaptureViolation(
                f"{new.place}: operation {number}, {new.name} of {_shapes(new)}: a tensor from outside of the step "
                f"lies elsewhere than when it was recorded at {old.place}; keep it and write into it in place"
            )
    if len(before) != len(now):
        longer = (before if len(before) > len(now) else now)[min(len(before), len(now))]
        raise CaptureViolation(
            f"{longer.place}: {len(now)} operations, recorded were {len(before)}; first of the rest: {longer.name}"
        )


def _shapes(operation: Operation) -> str:
    return ", ".join(f"{dtype.removeprefix('torch.')} {list(shape)}" for dtype, shape in operation.inputs)
