"""One step, captured whole: gradients cleared, all microbatches, reduction, clipping, optimizer, parameter gather.

    first call    the step's Python code runs once and is recorded; nothing is computed, no state moves
    every call    inputs are copied to where the recording reads them; one launch replays it

A graph serves one kind of step: a mode, a number of microbatches, a signature of the batch. It holds its state itself;
two graphs, or two runs in one process, share nothing but the memory pool. It records addresses: what the step reads
and writes outside of the pool must stay where it is, which every replay checks for the tensors given as `watched`.

How the code is recorded is a `Recording`: `CudaRecording` on a GPU, a checking stand-in on a CPU (`checks.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.core import graph_state
from megatron.core.full_iteration_graph.pool import GraphPool
from megatron.core.full_iteration_graph.static_inputs import Batch, StaticInputs

Body = Callable[[Sequence[Batch]], torch.Tensor]
"""The step: batches on the device -> everything that the host will read of it, one tensor [n]."""


class Recording(Protocol):
    """Records a call without arguments, and repeats it."""

    def record(self, call: Callable[[], torch.Tensor]) -> None:
        """Record `call`, which returns a tensor [n]; nothing is computed."""
        ...

    def repeat(self) -> torch.Tensor:
        """Do what was recorded, in the order of the current stream; the result [n] is overwritten by the next call."""
        ...

    def destroy(self) -> None:
        """Drop the recording."""
        ...


class CudaRecording:
    """A CUDA graph. `generators` are the random states beside the default one that the step draws from."""

    def __init__(self, pool: GraphPool, generators: Sequence[torch.Generator]) -> None:
        self._pool = pool
        self._generators = list(generators)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: torch.Tensor | None = None

    def record(self, call: Callable[[], torch.Tensor]) -> None:
        """Capture `call` on the pool's stream. A graph whose capture broke is kept too: `destroy` must find it."""
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            self._graph.register_generator_state(generator)
        with self._pool.capturing(self._graph):
            self._outputs = call()

    def repeat(self) -> torch.Tensor:
        """Launch the graph."""
        assert self._graph is not None, "a replay before the capture, or after destroy()"
        assert self._outputs is not None, "a capture without a result"
        self._graph.replay()
        return self._outputs

    def destroy(self) -> None:
        """Destroy the graph; communicators that it holds are free afterwards."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._outputs = None


class FullIterationGraph:
    """A captured step.

    Args:
        name: What it is called in errors and in the log.
        body: The step; the same kernels in the same order whatever the numbers are, without a host read.
        batches: Batches of the shapes that it will be replayed with.
        recording: How it is captured.
        device: Where it runs.
        watched: Tensors outside of the pool that the step uses, by name; kept alive, their places compared.
    """

    def __init__(
        self,
        name: str,
        body: Body,
        batches: Sequence[Batch],
        *,
        recording: Recording,
        device: torch.device,
        watched: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.name = name
        self._body = body
        self._recording = recording
        self._watched = dict(watched or {})
        self._addresses: list[int] = []
        self.is_alive = False
        self.inputs = StaticInputs(name, batches, device)
        self.num_replays = 0

    def capture(self) -> None:
        """Record the step. Raises: RuntimeError with the step's own error, and what usually causes it.

        Whatever is raised, nothing of the graph is left.
        """
        graph_state.register(self)
        raised: list[Exception] = []

        def call() -> torch.Tensor:
            try:
                return self._body(self.inputs.batches)
            except Exception as error:
                raised.append(error)  # the end of a broken capture raises another one, which says less
                raise

        try:
            with graph_state.capturing():
                self._recording.record(call)
        except Exception as error:
            self.destroy()
            if not isinstance(error, RuntimeError):
                raise
            cause = raised[0] if raised else error
            raise RuntimeError(f"graph {self.name!r}: capture failed: {cause}{explain(str(cause))}") from cause
        self._addresses = [tensor.data_ptr() for tensor in self._watched.values()]
        self.is_alive = True

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Bring what the next `run` will probably be given to the device, while this one is at work.

        Host: no synchronisation. Batches that do not fit are left for `run` to refuse.
        """
        if self.is_alive and self.inputs.fits(batches):
            self.inputs.stage(batches)

    def run(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Replay with the numbers of `batches`; the result [n] is overwritten by the next call.

        Host: no synchronisation.
        """
        assert self.is_alive, f"graph {self.name!r}: run() before capture()"
        self._check_addresses()
        self.inputs.fill(batches)
        self.num_replays += 1
        return self._recording.repeat()

    def _check_addresses(self) -> None:
        """Refuse to replay over memory that was moved or given back since the capture."""
        now = [tensor.data_ptr() for tensor in self._watched.values()]
        if now == self._addresses:
            return
        moved = [name for name, a, b in zip(self._watched, self._addresses, now, strict=True) if a != b]
        raise RuntimeError(
            f"graph {self.name!r}: {', '.join(moved[:3])}{' and more' if len(moved) > 3 else ''}: not where the "
            "captured step reads it; load and convert in place (copy_), or destroy the graph and capture again."
        )

    def destroy(self) -> None:
        """Drop the graph and its result; a second call does nothing."""
        self._recording.destroy()
        self._body = _destroyed
        self._watched.clear()
        self.is_alive = False


def _destroyed(batches: Sequence[Batch]) -> torch.Tensor:
    raise AssertionError("the graph was destroyed")


CAUSES = (
    ("unjoined", "a side stream was given work and not joined: go through core/streams.py, whose step() joins all"),
    ("communicator", "a process group was used for the first time: use it once before the capture"),
    ("ncclCommInit", "a process group was used for the first time: use it once before the capture"),
    ("generator", "a random state was not registered: draw through the tracker of tensor_parallel/random.py"),
    ("capturing", "the step waits for the device or copies from pageable memory: read flags after the step"),
    ("out of memory", "a capture frees nothing that it still reaches: lower --micro-batch-size or the row budget"),
)
"""Words of an error, and what they mean during a capture."""


def explain(text: str) -> str:
    """The usual cause of a capture error with this text, behind a colon; nothing if it is not known."""
    return next((f"; {cause}" for words, cause in CAUSES if words.lower() in text.lower()), "")


def collect_blockers(modules: Sequence[Any]) -> list[str]:
    """What the modules below `modules` say against being captured: `field=value: reason; remedy`, each once."""
    found: dict[str, None] = {}
    for root in modules:
        for module in root.modules():
            ask = getattr(module, "graph_capture_blockers", None)
            found.update(dict.fromkeys(ask() if ask is not None else ()))
    return list(found)
