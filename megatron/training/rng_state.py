"""Every generator a rank draws from, as tensors, so that a resumed run draws the numbers it would have drawn.

Python's and NumPy's generators are unpacked into tensors as well: a checkpoint holds no pickled object.
"""

import math
import random

import numpy
import torch
from torch import Tensor

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_PYTHON_VERSION = 3
_TRACKER = "tracker."


def pack_rng_state() -> dict[str, Tensor]:
    """Copies of all states on the CPU: torch, accelerator, tracker, Python and NumPy; {name: [bytes] or [words]}."""
    tracker = get_cuda_rng_tracker()
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)  # noqa: NPY002  the global generator is what libraries draw from
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        **{_TRACKER + name: value for name, value in tracker.get_states().items()},
    }
    if tracker.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(tracker.device)
    return state


def restore_rng_state(state: dict[str, Tensor]) -> None:
    """Put back what `pack_rng_state` gave."""
    tracker = get_cuda_rng_tracker()
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].item()
    random.setstate((_PYTHON_VERSION, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    keys = state["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))  # noqa: NPY002
    tracker.set_states(
        {name.removeprefix(_TRACKER): value for name, value in state.items() if name.startswith(_TRACKER)}
    )
    if tracker.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], tracker.device)
