"""Steps whose outcome the host reads once, at their end: captured steps, and steps under a row budget.

    eager     --cuda-graph-warmup-steps steps, and every step that is repeated without a limit of rows
    capture   a training step after those; an evaluation step, or a step of another budget, when it comes a second time
    replay    from then on; a graph for each mode, number of microbatches and budget

One vector holds all that the host wants to know of a step: the guard's flags, gradient norm, zeros, figures of the
routers, sums of losses. It is copied to pinned memory behind the step, and the host waits for that copy alone. While
the device replays a step, the host prints the log line of the last one, fetches the batches of the next one and brings
them to the device.

The same code runs a step eagerly and captures it, so the two do the same work in the same order.
"""

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch

from megatron.core.errors import ConfigError, DivergenceError
from megatron.core.full_iteration_graph import CudaRecording, FullIterationGraph, GraphPool, collect_blockers
from megatron.core.full_iteration_graph.graph import Body, Recording
from megatron.core.full_iteration_graph.static_inputs import Batch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.step_guard import LOAD, NON_FINITE, NUM_FLAGS, OVERFLOW, StepGuard, guarding
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_logging import MoEMetrics
from megatron.core.utils.collectives import barrier, warm_up
from megatron.core.utils.logging import get_logger, log_single_rank
from megatron.training.data_loaders import WholeSet
from megatron.training.evaluation import forward_losses
from megatron.training.model_setup import complete_parameters
from megatron.training.overflow_rerun import OverflowRerun, StepReport
from megatron.training.train_state import StepResult, TrainingRun
from megatron.training.train_step import (
    accumulate_gradients,
    means_of,
    reduce_totals,
    refuse_non_finite,
    tell_all_stages,
)

logger = get_logger(__name__)


class Lookahead:
    """An iterator that can fetch items before they are asked for."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._fetched: deque[Any] = deque()

    def __iter__(self) -> "Lookahead":
        return self

    def __next__(self) -> Any:
        return self._fetched.popleft() if self._fetched else next(self._items)

    def fetch(self, count: int) -> list[Any]:
        """The next `count` items, or as many as there are; they are still to come."""
        missing = max(count - len(self._fetched), 0)
        self._fetched.extend(islice(self._items, missing))
        return list(islice(self._fetched, count))


class Mode(enum.Enum):
    """What a step is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class StepKind(NamedTuple):
    """What makes two steps the same work."""

    mode: Mode
    num_microbatches: int
    budget: float | None

    def __str__(self) -> str:
        rows = "" if self.budget is None else f", {self.budget} x balanced rows"
        return f"{self.mode.value}, {self.num_microbatches} microbatches{rows}"


class GuardedSteps:
    """The steps of one run. `recording` makes what a step is captured with; None makes CUDA graphs, if asked for."""

    def __init__(self, run: TrainingRun, recording: Callable[[], Recording] | None = None) -> None:
        args = run.args
        self._run = run
        factor = args.moe_expert_rank_capacity_factor if args.num_experts else None
        budgets = [None] if factor is None else [factor, *args.moe_rank_capacity_tiers, None]
        self._rerun = OverflowRerun(budgets, run.device, run.counters)
        self._guard = StepGuard(run.device)
        self._graphs: dict[StepKind, FullIterationGraph] = {}
        self._num_eager: Counter[StepKind] = Counter()
        self._loss_keys: dict[Mode, tuple[str, ...]] = {}
        self._pool: GraphPool | None = None
        self._recording = recording
        if recording is None and run.model_config.captures_iteration:
            self._pool = GraphPool(run.device)
            self._recording = self._record_cuda
        self._lookahead = None if run.train_iterator is None else Lookahead(run.train_iterator)
        run.train_iterator = self._lookahead
        self._routers = MoEMetrics(run.model)
        self._host: dict[int, torch.Tensor] = {}
        """Pinned memory by the numbers that it holds."""
        self._replayed: Sequence[Batch] = ()
        """Inputs of the last replay: their memory goes back while the device does the next one."""
        self._is_warm = False

    # What the loop calls.

    def train_step(self) -> StepResult:
        """Do one training step, more than once if rows overflow."""
        run, args = self._run, self._run.args
        num_microbatches, batch_size = get_num_microbatches(), get_current_global_batch_size()
        batches = _take(run.train_iterator, num_microbatches)
        run.optimizer.write_learning_rates()
        report, num_overflows = self._perform(Mode.TRAIN, batches, self._train_body)
        norm, num_zeros, *values = report.values
        num_pairs = 2 * len(self._loss_keys[Mode.TRAIN])
        losses = means_of(self._loss_keys[Mode.TRAIN], _pairs(values[:num_pairs]))
        losses = tell_all_stages(losses, run.pg_collection)
        if report.is_non_finite and args.check_for_nan_in_loss_and_grad:
            self._refuse(losses, report)
        run.optimizer.settle(report.is_non_finite)
        if not report.is_non_finite:
            run.scheduler.step(increment=batch_size)
        if args.empty_unused_memory_level >= 1 and run.device.type == "cuda":
            torch.cuda.empty_cache()
        return StepResult(
            losses=losses,
            is_skipped=report.is_non_finite,
            grad_norm=None if report.is_non_finite else norm,
            num_zeros_in_grad=num_zeros if args.log_num_zeros_in_grad and not report.is_non_finite else None,
            num_microbatches=num_microbatches,
            batch_size=batch_size,
            num_overflows=num_overflows,
            row_load=report.row_load if len(self._rerun.budgets) > 1 else None,
            router_sums=values[num_pairs:],
        )

    def evaluate(self, data_iterator: Any, num_microbatches: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
        """Forward over one batch; the summed pairs [2] of this rank, by loss key."""
        batches = _take(data_iterator, num_microbatches)

        def body(static: Sequence[Batch]) -> torch.Tensor:
            return self._evaluation_body(static, micro_batch_size)

        is_captured = not isinstance(data_iterator, WholeSet)  # a whole set is one long batch, seen once
        report, _ = self._perform(Mode.EVALUATE, batches, body, is_captured)
        keys = self._loss_keys[Mode.EVALUATE]
        pairs = torch.tensor(report.values, dtype=torch.float64, device=self._run.device).view(-1, 2)
        return dict(zip(keys, pairs, strict=True))

    def close(self) -> None:
        """Destroy all graphs, and say what budget would have held."""
        self._destroy_graphs()
        if self._rerun.highest_load > 0:
            log_single_rank(logger, logging.INFO, f"rows: {self._rerun.recommendation()}")

    # The work of a step.

    def _train_body(self, batches: Sequence[Batch]) -> torch.Tensor:
        """A training step without a host read: flags, norm, zeros, loss pairs, router figures, reduced; fp64 [n]."""
        run, guard = self._run, self._guard
        with guarding(guard):
            guard.begin()
            self._rerun.rollback.save()
            totals = accumulate_gradients(run, _as_iterator(batches), len(batches))
            pairs = reduce_totals(totals, run.pg_collection.dp_cp) if totals else self._guard.flags[:0]
            is_checked = run.args.check_for_nan_in_loss_and_grad
            if is_checked:
                guard.report_values(pairs)
            norm, num_zeros = run.optimizer.step_on_device(guard, refuses_non_finite=is_checked)
            complete_parameters(run.model)
            routers = self._routers.reduce(run.pg_collection)
        self._loss_keys[Mode.TRAIN] = tuple(totals)
        zeros = torch.zeros_like(norm) if num_zeros is None else num_zeros
        return _pack(guard.flags, norm, zeros, pairs, routers)

    @torch.no_grad()
    def _evaluation_body(self, batches: Sequence[Batch], micro_batch_size: int) -> torch.Tensor:
        """An evaluation step without a host read: flags and loss pairs of this rank, fp64 [n]."""
        run, guard = self._run, self._guard
        with guarding(guard):
            guard.begin()
            self._rerun.rollback.save()
            totals = forward_losses(run, _as_iterator(batches), len(batches), micro_batch_size)
            guard.agree(run.pg_collection.world)
        self._loss_keys[Mode.EVALUATE] = tuple(totals)
        return _pack(guard.flags, *totals.values())

    # Eager, captured, repeated.

    def _perform(
        self, mode: Mode, batches: list[Batch], body: Body, is_captured: bool = True
    ) -> tuple[StepReport, int]:
        """Run a step with each budget in turn until it fits."""
        self._run.counters["re-runs"] += 0

        def attempt(budget: float | None) -> StepReport:
            self._guard.row_factor = budget
            kind = StepKind(mode, len(batches), budget)
            return self._read(self._execute(kind, batches, body, is_captured))

        report, num_overflows = self._rerun.run(attempt)
        self._run.counters["re-runs"] += num_overflows
        return report, num_overflows

    def _execute(self, kind: StepKind, batches: list[Batch], body: Body, is_captured: bool) -> torch.Tensor:
        graph = self._graphs.get(kind)
        if graph is None:
            self._watch_buffers()
        if graph is None and is_captured and self._is_due(kind):
            graph = self._capture(kind, batches, body)
        if graph is not None:
            self._run.counters["graph replays"] += 1
            outputs = graph.run(batches)
            self._run.put_off.do()
            self._replayed = batches
            if kind.mode is Mode.TRAIN and self._lookahead is not None:  # the device is at work meanwhile
                coming = self._lookahead.fetch(kind.num_microbatches)
                if kind.budget == self._rerun.budgets[0]:
                    graph.prepare(coming)
            return outputs
        self._num_eager[kind] += 1
        self._run.put_off.do()
        with nullcontext() if self._pool is None else self._pool.allocating():
            return body(batches)

    def _watch_buffers(self) -> None:
        """Let the rollback cover the buffers that the model has now. A graph saves those of its capture: it ends."""
        if self._rerun.watch(self._run.model) and self._graphs:
            log_single_rank(logger, logging.INFO, "the model has other buffers than its graphs know: they are dropped")
            self._destroy_graphs()

    def _destroy_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.destroy()
        self._graphs.clear()

    def _is_due(self, kind: StepKind) -> bool:
        """True if a step of this kind has run eagerly often enough to be captured."""
        is_without_limit = kind.budget is None and len(self._rerun.budgets) > 1
        if self._recording is None or is_without_limit:
            return False
        is_first_train = kind.mode is Mode.TRAIN and not any(known.mode is Mode.TRAIN for known in self._graphs)
        needed = self._run.args.cuda_graph_warmup_steps if is_first_train else 1
        has_other_length = any(known[::2] == kind[::2] for known in self._graphs)
        return has_other_length or self._num_eager[kind] >= needed

    def _capture(self, kind: StepKind, batches: list[Batch], body: Body) -> FullIterationGraph:
        run = self._run
        assert self._recording is not None, "a capture without a way to record"
        if not self._is_warm:
            warm_up(run.pg_collection.all_groups(), run.device)
            self._is_warm = True
        barrier(run.pg_collection.world)
        graph = FullIterationGraph(
            str(kind),
            body,
            batches,
            recording=self._recording(),
            device=run.device,
            watched=self._watched(),
        )
        graph.capture()
        barrier(run.pg_collection.world)
        self._graphs[kind] = graph
        run.counters["graph captures"] += 1
        text = (
            ""
            if self._pool is None
            else f", the pool of all graphs holds {self._pool.reserved_bytes() / 2**30:.2f} GiB"
        )
        log_single_rank(logger, logging.INFO, f"captured a graph ({kind}){text}")
        return graph

    def _record_cuda(self) -> Recording:
        assert self._pool is not None, "a CUDA graph without a pool"
        return CudaRecording(self._pool, get_cuda_rng_tracker().generators())

    def _watched(self) -> dict[str, torch.Tensor]:
        """What a step uses and nobody may move: parameters, buffers and gradients."""
        named: dict[str, torch.Tensor] = {}
        for index, chunk in enumerate(self._run.model):
            named |= {f"{index}.{name}": tensor for name, tensor in chunk.named_parameters()}
            named |= {f"{index}.{name}": tensor for name, tensor in chunk.named_buffers()}
            for kind, buffer in getattr(chunk, "buffers_by_kind", {}).items():
                named[f"{index}.gradients of {kind}"] = buffer.grad_data
        return named

    # What the host reads.

    def _read(self, outputs: torch.Tensor) -> StepReport:
        """Copy the result of a step [n] to the host and wait for it."""
        if outputs.is_cuda:
            count = outputs.numel()
            if count not in self._host:
                self._host[count] = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=True)
            outputs = self._host[count].copy_(outputs, non_blocking=True)
            torch.cuda.current_stream(self._run.device).synchronize()
        values = outputs.tolist()
        flags = values[:NUM_FLAGS]
        return StepReport(
            is_overflow=flags[OVERFLOW] > 0,
            is_non_finite=flags[NON_FINITE] > 0,
            row_load=flags[LOAD],
            values=values[NUM_FLAGS:],
        )

    def _refuse(self, losses: dict[str, float], report: StepReport) -> None:
        """Stop on a loss or gradient that is not finite; nothing was updated. A loss scale takes care of gradients."""
        run = self._run
        iteration = run.state.iteration + 1
        refuse_non_finite(losses, iteration)
        if run.args.fp16 or run.args.loss_scale is not None:
            return
        for chunk in run.model:
            for bucket in getattr(chunk, "bucket_groups", ()):
                bucket.raise_if_not_finite()
        raise DivergenceError(
            f"iteration {iteration}: grad norm={report.values[0]}: the gradients of another rank are not finite, or "
            "their squares overflow; lower the learning rate, or pass --no-check-for-nan-in-loss-and-grad."
        )


def build_guarded_steps(run: TrainingRun) -> GuardedSteps | None:
    """The guarded steps of a run that captures its steps or has a row budget; None for any other.

    Raises: ConfigError naming everything in the model that cannot be captured.
    """
    config = run.model_config
    is_bounded = bool(config.num_moe_experts) and config.moe_expert_rank_capacity_factor is not None
    if not (config.captures_iteration or is_bounded):
        return None
    if config.captures_iteration and run.device.type != "cuda":
        raise ConfigError(
            f"cuda_graph_impl='full_iteration' with device={run.device.type!r}: a CUDA graph needs a GPU; use "
            "--cuda-graph-impl none."
        )
    problems = collect_blockers(run.model) if config.captures_iteration else []
    if problems:
        raise ConfigError("\n".join(problems))
    return GuardedSteps(run)


def _take(data_iterator: Any, count: int) -> list[Batch]:
    """The next batches; empty ones on a pipeline stage without data."""
    return [{} if data_iterator is None else next(data_iterator) for _ in range(count)]


def _as_iterator(batches: Sequence[Batch]) -> Iterator[Batch] | None:
    """What the schedule draws from; None on a pipeline stage without data."""
    return iter(batches) if batches[0] else None


def _pack(*tensors: torch.Tensor) -> torch.Tensor:
    """All numbers in one vector, fp64 [n]."""
    return torch.cat([tensor.detach().to(torch.float64).flatten() for tensor in tensors if tensor.numel()])


def _pairs(values: Sequence[float]) -> list[Sequence[float]]:
    return [values[i : i + 2] for i in range(0, len(values), 2)]
