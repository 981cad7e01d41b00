"""Parameters whose memory lies end to end, updated as one.

A layer has a parameter for each expert, and a shard holds them one behind the other, as the gradients in their buffer
lie. Moments are laid out in the same way. One launch then does for all that a launch each would do, as Adam treats
every element alike.
"""

from collections.abc import Callable, Sequence

import torch

from megatron.core.fusions.fused_adam import AdamTensors

MAX_GAP_BYTES = 1024
"""Between two parameters of a shard lies at most what aligns the second."""


def zeros_beside(params: Sequence[torch.Tensor], dtype_for: Callable[[torch.dtype], torch.dtype]) -> list[torch.Tensor]:
    """Zeros in the shapes [...] of `params`; those of parameters that lie side by side do so too.

    Dtype: what `dtype_for` makes of the parameter's.
    """
    zeros: dict[int, torch.Tensor] = {}
    for run in _runs(params):
        first, last = params[run[0]], params[run[-1]]
        places = [(params[i].data_ptr() - first.data_ptr()) // first.element_size() for i in run]
        buffer = first.new_zeros(places[-1] + last.numel(), dtype=dtype_for(first.dtype))
        for i, place in zip(run, places, strict=True):
            zeros[i] = buffer[place : place + params[i].numel()].view(params[i].shape)
    return [zeros[i] for i in range(len(params))]


def _runs(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """Numbers of the parameters [...] in runs that lie side by side in one storage, in the order of memory."""
    runs: list[list[int]] = []
    end = 0
    for i in sorted(range(len(params)), key=lambda i: params[i].data_ptr()):
        param, last = params[i], params[runs[-1][-1]] if runs else None
        is_near = last is not None and last.dtype == param.dtype and param.data_ptr() - end <= MAX_GAP_BYTES
        if is_near and last is not None and _is_one_storage(last, param):
            runs[-1].append(i)
        else:
            runs.append([i])
        end = param.data_ptr() + param.nbytes
    return runs


def join_neighbours(parts: Sequence[AdamTensors]) -> list[AdamTensors]:
    """Parameters [...] of one group as few flat ones [n]; those that are joined have taken as many steps."""
    runs: list[list[AdamTensors]] = []
    for part in sorted(parts, key=lambda part: part.param.data_ptr()):
        if runs and _follows(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _follows(first: AdamTensors, second: AdamTensors) -> bool:
    """True if each tensor [...] of the second begins where that of the first ends."""
    pairs = ((a, b) for name, a, b in zip(first._fields, first, second, strict=True) if name != "step")
    return all(
        a is b if a is None or b is None else a.data_ptr() + a.nbytes == b.data_ptr() and _is_one_storage(a, b)
        for a, b in pairs
    )


def _joined(run: Sequence[AdamTensors]) -> AdamTensors:
    first, count = run[0], sum(part.param.numel() for part in run)
    flat = {
        name: None if tensor is None else tensor.as_strided((count,), (1,))
        for name, tensor in first._asdict().items()
        if name != "step"
    }
    return first._replace(**flat)


def _is_one_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
