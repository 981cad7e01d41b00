"""The training state as hashes: proves that something left it alone, or changed exactly what it should.

    before = snapshot(model=chunks, optimizer=optimizer)
    evaluate()
    assert diff(before, snapshot(model=chunks, optimizer=optimizer)) == {}

Names say where a value lies: `model.<path>`, `model.<path>.grad`, `optimizer.<...>`, `rng.<...>`, `counter.<...>`.
"""

import hashlib
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from megatron.core import num_microbatches_calculator as batch_sizes
from megatron.core.tensor_parallel.random import get_base_seed, get_cuda_rng_tracker

CHANGED, ADDED, REMOVED, REBOUND = "changed", "added", "removed", "rebound"


@dataclass(frozen=True)
class Entry:
    """Bytes, type and place of one value."""

    digest: str
    dtype: str
    shape: tuple[int, ...]
    data_ptr: int | None
    """None for values that are no tensor."""


def snapshot(
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] = (),
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    plain_tensors: Sequence[str] = (),
) -> dict[str, Entry]:
    """Hash everything that a step may read or write.

    `plain_tensors` names the attributes (last part of the path) in which modules may keep tensors that are neither
    parameters nor buffers; any other such tensor is an error, since nothing would save or check it.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    values: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        prefix = "model." if len(chunks) == 1 else f"model.{index}."
        values.update((prefix + name, value) for name, value in _module_values(chunk, frozenset(plain_tensors)))
    if optimizer is not None:
        values.update(_leaves("optimizer", optimizer.state_dict()))
    if scheduler is not None:
        values.update(_leaves("scheduler", scheduler.state_dict()))
    values.update(_leaves("extra", dict(extra or {})))
    values.update(_process_values())
    return {name: _entry(value) for name, value in values.items()}


def diff(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> dict[str, str]:
    """{name: verdict} of all differences; `rebound` means equal bytes at another address."""
    verdicts = dict.fromkeys(before.keys() - after.keys(), REMOVED)
    verdicts |= dict.fromkeys(after.keys() - before.keys(), ADDED)
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        if (a.digest, a.dtype, a.shape) != (b.digest, b.dtype, b.shape):
            verdicts[name] = CHANGED
        elif a.data_ptr != b.data_ptr:
            verdicts[name] = REBOUND
    return dict(sorted(verdicts.items()))


def _module_values(chunk: torch.nn.Module, allowed: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Parameters with their gradients, all buffers, and tensors kept as plain attributes."""
    for name, param in chunk.named_parameters():
        yield name, param
        for kind in ("grad", "main_grad"):
            if getattr(param, kind, None) is not None:
                yield f"{name}.{kind}", getattr(param, kind)
    yield from chunk.named_buffers()
    for path, module in chunk.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for place, tensor in _tensors(attribute, value):
                name = f"{path}.{place}".lstrip(".")
                if isinstance(tensor, torch.nn.Parameter):
                    continue  # a second reference to a registered parameter
                assert attribute in allowed, (
                    f"{name} is a tensor that is neither parameter nor buffer; register it, or name it in plain_tensors"
                )
                yield name, tensor


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in an attribute, through lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}.{index}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A nested state dict as {path: tensor or plain value}."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}.{index}", item)
    else:
        yield name, value


def _process_values() -> Iterator[tuple[str, Any]]:
    """Random states and counters of this process."""
    yield "rng.python", random.getstate()
    yield "rng.numpy", pickle.dumps(numpy.random.get_state())  # noqa: NPY002  the process-wide state is meant
    # Random states arrive as copies, whose address says nothing: they count as bytes.
    yield "rng.torch", torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"rng.cuda{index}", state.numpy().tobytes()
    for name, state in get_cuda_rng_tracker().get_states().items():
        yield f"rng.tracker.{name}", state.numpy().tobytes()
    yield "rng.base_seed", get_base_seed()
    try:
        yield "counter.global_batch_size", batch_sizes.get_current_global_batch_size()
        yield "counter.num_microbatches", batch_sizes.get_num_microbatches()
    except RuntimeError:  # no calculator in this process
        return


def _entry(value: Any) -> Entry:
    if not isinstance(value, torch.Tensor):
        data = value if isinstance(value, bytes) else repr(value).encode()
        return Entry(_digest(data), type(value).__name__, (), None)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Entry(_digest(raw), str(value.dtype), tuple(value.shape), value.data_ptr())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
