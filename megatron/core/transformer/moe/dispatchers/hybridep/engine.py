"""The seam between the hybridep dispatcher and what moves its rows.

The dispatcher knows routing, gradients and sizes; an engine knows how bytes travel. It has two operations on plain
tensors, each the gradient of the other, which all engines carry out with the same roundings in the same order:

    dispatch   hidden [T, h], probs [T, K]  ->  rows [P, h], row probs [P]
               A token travels once to each destination rank and is there copied into the rows of its experts.
               Rows are ordered by expert, source rank, token. Each expert's rows are padded to a multiple with zeros;
               rows behind the last expert's are not written.
    combine    rows [P, h], row probs [P]   ->  hidden [T, h], probs [T, K]
               The rows of a token on one rank are added up in fp32 in the order of expert ids and rounded to the wire's
               dtype, on its own rank too; these sums travel back and are added up in fp32 in the order of ranks. A
               row's probability goes back to its slot. Rows that were dropped add nothing. fp64 stays fp64.

    forward    rows, row_probs = dispatch(hidden, probs)         hidden = combine(rows)
    backward   grad_hidden, grad_probs = combine(grad, grad)     grad_rows = dispatch(grad), with the saved metadata

Under a row budget no shape depends on the routing: what does not fit is dropped from the end of the last experts, and
counted in `Exchange.dropped_rows`. Without one the engine brings the counts to the host once per exchange.

To add an engine: a module here with a subclass of `HybridEPEngine`, and a line in `ENGINES`.

Streams: `prepare` runs on the compute stream and is local to the rank. Everything that peers take part in, counts
included, is enqueued by `dispatch` and `combine` on the stream that is current when they are called, which is the same
for all calls of a step, in the same order on all ranks.

Legend: T tokens of this rank, K slots of a token, h width, W ranks, n experts on each, P rows at this rank's experts.
"""

import abc
import dataclasses
import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.configs.base import Violation, violation
from megatron.core.errors import ConfigError
from megatron.core.fp8.wire import pack_rows, unpack_rows
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.utils.collectives import all_gather_object
from megatron.core.utils.groups import group_rank, group_size
from megatron.core.utils.logging import get_logger

logger = get_logger(__name__)

_HERE = "megatron.core.transformer.moe.dispatchers.hybridep"
ENGINES = {
    "symm_mem": (f"{_HERE}.symm_mem", "SymmMemEngine"),
    "collective": (f"{_HERE}.collective", "CollectiveEngine"),
    "deep_ep": (f"{_HERE}.deep_ep", "DeepEPHybridEngine"),
}
"""Value of --moe-hybridep-engine -> module and class; the module is imported when the engine is asked for."""

BACKENDS = {
    "hybridep": ENGINES,
    "deepep": {"deep_ep_buffer": (f"{_HERE}.deep_ep", "DeepEPBufferEngine")},
}
"""Value of --moe-flex-dispatcher-backend -> its engines."""

AUTO, AUTO_ORDER = "auto", ("symm_mem", "collective", "deep_ep_buffer")
"""The value that leaves the choice to the group, and what it tries in turn among the engines of the backend."""


@dataclasses.dataclass(frozen=True)
class EngineSetup:
    """What an engine is built for. Layers with equal setups share one engine and its buffers."""

    group: dist.ProcessGroup | None
    """The W ranks of expert and expert tensor parallelism; None for one rank."""

    num_local_experts: int
    """n"""

    hidden_size: int
    """h"""

    row_multiple: int = 1
    """Each expert's rows are padded to a multiple of this."""

    num_sms: int | None = None
    """Multiprocessors for the communication kernels; None: the engine's own choice."""

    @property
    def num_ranks(self) -> int:
        """W"""
        return group_size(self.group)

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""
        return group_rank(self.group)


class HybridEPEngine(abc.ABC):
    """Moves rows between the ranks of a group. It holds buffers, but nothing of a microbatch: that is in `Exchange`."""

    has_static_sizes = True
    """False if the engine cannot work with a row budget."""

    packs_rows = False
    """True if rows can travel as 8-bit codes."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    @classmethod
    def require_packages(cls) -> object:
        """Raise MissingDependencyError if a package that the engine needs is absent."""
        return None

    @classmethod
    @abc.abstractmethod
    def why_unavailable(cls, setup: EngineSetup) -> str | None:
        """Tell why this rank cannot run the engine, None if it can. Local: no communication, no buffers."""

    @abc.abstractmethod
    def reads_counts(self, is_static: bool) -> bool:
        """True if an exchange makes the host wait for counts, with a row budget or without."""

    @abc.abstractmethod
    def prepare(self, exchange: Exchange) -> None:
        """Compute on the device what follows from this rank's own routing; no communication."""

    @abc.abstractmethod
    def dispatch(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden [T, h], probs [T, K] -> rows [P, h], row probs [P].

        The first call of an exchange sets its `num_rows`, `tokens_per_expert`, `dropped_rows` and `saved`. A later one
        (the gradient of combine; probs are None) reuses them: no counts, no host. Any strides, T may be 0.
        The results are new tensors, no views of a buffer of the engine.
        """

    def dispatch_packed(
        self, exchange: Exchange, hidden: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`dispatch` of hidden [T, h], probs [T, K] whose rows travel as codes with 1 x 128 scales.

        All engines with `packs_rows` return the same bits: those of `core/fp8/wire`, in the dtype of `hidden`. As it
        stands here it is for engines whose `dispatch` takes rows of any width.
        """
        packed, row_probs = self.dispatch(exchange, pack_rows(hidden), probs)
        return unpack_rows(packed, hidden.shape[1]), row_probs

    @abc.abstractmethod
    def combine(
        self, exchange: Exchange, rows: torch.Tensor, row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [P, h], row probs [P] or None -> hidden [T, h] in the dtype of the rows, probs [T, K] or None.

        Neither padding rows nor those behind the last expert's are read.
        """


def check_backend(config: Any) -> list[Violation]:
    """Refuse an engine that the backend does not have, and what none of the engines in question can do."""
    field = "moe_flex_dispatcher_backend"
    use_hybridep = "use --moe-flex-dispatcher-backend hybridep"
    engines = BACKENDS.get(config.moe_flex_dispatcher_backend)
    if engines is None:
        return []  # refused as a value, and by shared_engine
    if config.moe_hybridep_engine not in (AUTO, *engines):
        remedy = f"{use_hybridep}, or drop --moe-hybridep-engine"
        return [violation(config, f"moe_hybridep_engine {field}", "this backend has no such engine", remedy)]
    found = []
    chosen = [engine_class(engines, name) for name in engines if config.moe_hybridep_engine in (AUTO, name)]
    if config.moe_dispatch_fwd_dtype == "fp8" and not any(engine.packs_rows for engine in chosen):
        names = f"moe_dispatch_fwd_dtype {field} moe_hybridep_engine"
        remedy = f"{use_hybridep} --moe-hybridep-engine auto, or drop --moe-dispatch-fwd-dtype"
        found.append(violation(config, names, "this engine sends rows as they are", remedy))
    if not any(engine.has_static_sizes for engine in chosen):
        for name in ("moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity"):
            if getattr(config, name):
                remedy = f"{use_hybridep}, or drop --{name.replace('_', '-')}"
                found.append(violation(config, f"{name} {field}", "its row counts depend on the routing", remedy))
    return found


def engine_class(engines: dict[str, tuple[str, str]], name: str) -> type[HybridEPEngine]:
    """Import the class of one of a backend's engines."""
    if name not in engines:
        known = ", ".join([AUTO, *engines])
        raise ConfigError(f"moe_hybridep_engine={name!r}: not an engine of this backend; choose one of {known}.")
    module, class_name = engines[name]
    return getattr(importlib.import_module(module), class_name)


@functools.cache
def shared_engine(backend: str, name: str, setup: EngineSetup) -> HybridEPEngine:
    """The engine for the values of --moe-flex-dispatcher-backend and --moe-hybridep-engine, one for equal setups.

    `auto` takes the first engine of the backend that runs on all ranks of the group, and says which. Collective when
    it is first asked for; all ranks ask in the same order.

    Raises: ConfigError if no such engine runs on all ranks, MissingDependencyError if a package is missing for it.
    """
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ConfigError(
            f"moe_flex_dispatcher_backend={backend!r}: not a backend of this tree; choose one of {known}."
        )
    engines = BACKENDS[backend]
    candidates = [engine for engine in AUTO_ORDER if engine in engines] if name == AUTO else [name]
    reasons = []
    for candidate in candidates:
        chosen = engine_class(engines, candidate)
        if len(candidates) == 1:
            chosen.require_packages()
        answers = all_gather_object(chosen.why_unavailable(setup), setup.group)
        refusals = [f"rank {rank} of the expert ranks: {text}" for rank, text in enumerate(answers) if text]
        if not refusals:
            if name == AUTO and setup.rank == 0:
                reason = "".join(f" (not {reason})" for reason in reasons)
                logger.info("moe_hybridep_engine: auto takes %s%s", candidate, reason)
            return chosen(setup)
        reasons.append(f"{candidate}, {refusals[0]}")
    raise ConfigError(
        f"moe_hybridep_engine={name!r} with moe_flex_dispatcher_backend={backend!r}: {'; '.join(reasons)}; choose "
        "another engine, or --moe-flex-dispatcher-backend hybridep --moe-hybridep-engine auto."
    )


def reset() -> None:
    """Drop the shared engines with their buffers."""
    shared_engine.cache_clear()
