"""Compares what a Triton kernel does with what its caller declared, launch by launch, under the interpreter.

with LaunchWatch() as watch:
    kernel_gather(...)
watch.findings      what a launch touched without saying so
watch.names         kernels that were launched
"""

from typing import Any

import torch

from megatron.core import streams

GARBAGE = (0x10, 0x30)
"""Of the first operand; the others have the bytes behind it, so that a copy of garbage is no garbage of its place."""


class LaunchWatch:
    """Runs each launch twice with other garbage in what it is said to write but not to read."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.names: list[str] = []
        self._said: tuple[str, dict[int, torch.Tensor], dict[int, torch.Tensor]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)

    def on_access(self, name: str, reads: Any, writes: Any) -> None:
        """A declaration, used up by the next launch."""
        self._said = name, _storages(reads), _storages(writes)

    def __enter__(self) -> "LaunchWatch":
        from triton.runtime.interpreter import GridExecutor

        self._executor, self._run = GridExecutor, GridExecutor.__call__
        watch = self
        GridExecutor.__call__ = lambda executor, *args, **kwargs: watch._launch(executor, args, kwargs)
        streams.set_observer(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._executor.__call__ = self._run
        streams.set_observer(None)

    def _launch(self, executor: Any, args: Any, kwargs: Any) -> None:
        kernel = executor.fn.__name__
        self.names.append(kernel)
        said, self._said = self._said, None
        if said is None:
            self.findings.append(f"{kernel}: not declared")
            self._run(executor, *args, **kwargs)
            return
        _, reads, writes = said
        operands = _storages([*args, *kwargs.values()])
        self.findings += [f"{kernel}: an operand is not declared" for key in operands if key not in reads | writes]
        every = operands | reads | writes
        before = {key: data.clone() for key, data in every.items()}
        results = []
        for garbage in GARBAGE:
            for i, (key, data) in enumerate(every.items()):
                data.copy_(before[key])
                if key in writes and key not in reads:
                    data.fill_(garbage + i)
            self._run(executor, *args, **kwargs)
            results.append({key: data.clone() for key, data in every.items()})
        first, second = results
        for i, key in enumerate(every):
            if key not in writes:
                if not torch.equal(first[key], before[key]):
                    self.findings.append(f"{kernel}: writes what it is said to read")
                continue
            untouched = (first[key] == GARBAGE[0] + i) & (second[key] == GARBAGE[1] + i)
            if not torch.equal(first[key][~untouched], second[key][~untouched]):
                self.findings.append(f"{kernel}: reads what it is said to write")
            every[key].copy_(torch.where(untouched & (first[key] != second[key]), before[key], first[key]))


def _storages(values: Any) -> dict[int, torch.Tensor]:
    """{address: bytes [n] of the storage} of the tensors among `values`, those inside of descriptors included."""
    tensors = [getattr(value, "base", value) for value in values]
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return found
