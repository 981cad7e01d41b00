"""Named random states, so that regions of the model draw numbers that do or do not differ between parallel ranks.

A region that holds different data on each tensor parallel rank (dropout on a shard) must draw different numbers there,
a replicated region equal ones. The default generator serves replicated regions; the tracker keeps further states by
name and swaps one in for the length of a `with` block:

    with get_cuda_rng_tracker().fork():            # tensor parallel region
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):

Seeds, with S = the seed passed to `model_parallel_cuda_manual_seed`:

    default, data parallel   S
    tensor parallel          S + 2718 + tp_rank
    expert parallel          S + 1024 + 100 * ep_rank + etp_rank

The tracker works on the generator of one device, the CPU's or the current accelerator's; upstream's names are kept
although nothing here needs CUDA. Initial weights use none of these states: they are drawn from `get_base_seed` and the
parameter's name.
"""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils.device import resolve_device
from megatron.core.utils.groups import group_rank

DEFAULT_BASE_SEED = 1234
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"


def get_expert_parallel_rng_tracker_name() -> str:
    """Name of the state that differs between expert parallel ranks."""
    return _EXPERT_PARALLEL_RNG_TRACKER_NAME


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the state that is equal on all ranks of a pipeline stage."""
    return _DATA_PARALLEL_RNG_TRACKER_NAME


RngState = torch.Tensor | torch.Generator
"""A state as the tracker keeps it: on a CPU its bytes, uint8 [bytes], on CUDA a generator, which graphs can use."""


def _default_generator(device: torch.device) -> torch.Generator:
    """The default generator of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _get_state(device: torch.device) -> RngState:
    """State that `device`'s default generator draws from."""
    return _default_generator(device).graphsafe_get_state() if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: RngState) -> None:
    """Let `device`'s default generator draw from `state`; on CUDA the state itself advances, no bytes are copied."""
    if isinstance(state, torch.Generator):
        _default_generator(device).graphsafe_set_state(state)
    else:
        torch.set_rng_state(state)


def _seeded_state(device: torch.device, seed: int) -> RngState:
    """The state that `seed` gives."""
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    return generator if device.type == "cuda" else generator.get_state()


def _seed_device(device: torch.device, seed: int) -> None:
    """Seed `device`'s default generator and leave the other devices' alone."""
    generator = _default_generator(device) if device.type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


class RngStatesTracker:
    """States of one device's default generator, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._states: dict[str, RngState] = {}
        self._seeds: set[int] = set()

    def is_initialized(self) -> bool:
        """True once a state has been added or set."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all states and seeds."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """All states, {name: uint8 [bytes]}, for checkpoints; a later fork replaces tensors and writes in none."""
        kept = self._states.items()
        return {name: state.get_state() if isinstance(state, torch.Generator) else state for name, state in kept}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states, {name: uint8 [bytes]}; the seeds seen so far are kept.

        Graph: a state that exists already is written in place: graphs that draw from it go on from here.
        """
        self._states = {name: self._restored(name, state) for name, state in states.items()}

    def _restored(self, name: str, state: torch.Tensor) -> RngState:
        """A state from its bytes, uint8 [bytes]."""
        if self.device.type != "cuda":
            return state
        known = self._states.get(name)
        generator = known if isinstance(known, torch.Generator) else torch.Generator(self.device)
        generator.set_state(state)
        return generator

    def generators(self) -> list[torch.Generator]:
        """The states that a graph has to register; none on a CPU."""
        return [state for state in self._states.values() if isinstance(state, torch.Generator)]

    def add(self, name: str, seed: int) -> None:
        """Add the state that `seed` gives; name and seed must be new, two regions with one seed draw alike."""
        if name in self._states:
            raise RuntimeError(f"rng state {name!r}: exists already; call reset() before seeding again.")
        if seed in self._seeds:
            raise RuntimeError(f"rng state {name!r}: seed {seed} is taken by another state; choose another seed.")
        self._seeds.add(seed)
        self._states[name] = _seeded_state(self.device, seed)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from state `name` inside the block; it advances, the default generator is as before afterwards.

        Host: no synchronisation. Graph: capturable, if the graph has registered `generators()`.
        """
        if name not in self._states:
            raise RuntimeError(
                f"rng state {name!r}: unknown, have {sorted(self._states)}; call model_parallel_cuda_manual_seed first."
            )
        before = _get_state(self.device)
        _set_state(self.device, self._states[name])
        try:
            yield
        finally:
            if self.device.type != "cuda":
                self._states[name] = _get_state(self.device)
            _set_state(self.device, before)


@dataclass
class _RandomState:
    """The one tracker of this process and the seed that initial weights start from."""

    tracker: RngStatesTracker = field(default_factory=lambda: RngStatesTracker(torch.device("cpu")))
    base_seed: int = DEFAULT_BASE_SEED


_STATE = _RandomState()


def get_cuda_rng_tracker() -> RngStatesTracker:
    """The tracker of this process; it serves the device that was seeded last, the CPU before that."""
    return _STATE.tracker


class DeviceRngState:
    """Where the random numbers of a device stand: its default generator and the states of the tracker."""

    def __init__(self, device: torch.device) -> None:
        """Note the present states. Host: no synchronisation."""
        self._default = _default_generator(device) if device.type == "cuda" else torch.default_generator
        self._state = self._default.get_state()
        self._tracked = get_cuda_rng_tracker().get_states()

    def restore(self) -> None:
        """Go back to them, in place: graphs that draw from these states follow."""
        self._default.set_state(self._state)
        get_cuda_rng_tracker().set_states(self._tracked)


@contextmanager
def replayed(states: DeviceRngState) -> Iterator[None]:
    """Draw once more what was drawn from `states` on; afterwards all states are as before the block."""
    before = DeviceRngState(get_cuda_rng_tracker().device)
    states.restore()
    try:
        yield
    finally:
        before.restore()


def random_region(differs: bool) -> AbstractContextManager[None]:
    """Where tensor parallel ranks hold different data (`differs`) draw different numbers, elsewhere equal ones.

    Regions do not nest: the inner one would draw what the outer one draws again.
    """
    return get_cuda_rng_tracker().fork() if differs else nullcontext()


def get_base_seed() -> int:
    """The `--seed` of the run, from which initial weights are drawn by name; the same on all ranks."""
    return _STATE.base_seed


def set_base_seed(seed: int) -> None:
    """Set the seed of initial weights; must be equal on all ranks."""
    _STATE.base_seed = seed


def reset() -> None:
    """Forget tracker and base seed; the generators themselves are left as they are."""
    global _STATE
    _STATE = _RandomState()


def model_parallel_cuda_manual_seed(
    seed: int,
    *,
    device: torch.device | str = "auto",
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Seed the default generator of `device` and the tracker's three states from `seed`, see the file's table.

    `seed` may depend on the pipeline stage. It is not the seed of initial weights, see `set_base_seed`.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
    target = resolve_device(device) if isinstance(device, str) else device
    tracker = RngStatesTracker(target)
    _seed_device(target, seed)
    tracker.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + group_rank(groups.tp))
    tracker.add(
        _EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + 100 * group_rank(groups.ep) + group_rank(groups.expt_tp)
    )
    _STATE.tracker = tracker


def set_random_seed(
    seed: int,
    *,
    data_parallel_random_init: bool = False,
    device: torch.device | str = "auto",
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Seed everything a training run draws from: base seed, Python, NumPy, torch and the tracker.

    All but the base seed start from S = seed + 100 * pp_rank (+ 10 * dp_rank with `data_parallel_random_init`).
    """
    if seed <= 0:
        raise ValueError(f"seed={seed}: must be positive; set --seed to 1 or more.")
    groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
    set_base_seed(seed)
    stage_seed = seed + 100 * group_rank(groups.pp)
    if data_parallel_random_init:
        stage_seed += 10 * group_rank(groups.dp)
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)  # noqa: NPY002  user code may draw from the process-wide state
    torch.default_generator.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed, device=device, pg_collection=groups)
