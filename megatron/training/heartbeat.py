"""Signs of life: every rank posts where it stands, so that a run that breaks can say which ranks are behind.

    thread of each rank, every second:   heartbeat/<restart>/<rank> = {step, phase, operation, group, count, ...}
    on a broken or timed-out collective: watch the others for a few beats, then raise RankFailure with their names
    no progress for half the time limit: the same report as a warning, since NCCL may end the process without an error

The posts go to the launcher's key-value store through a connection of this file's own. In the report a rank is, in
this order: one that left with an error of its own; silent, its beats do not go on; behind, its step or its count of
collectives is below that of others of its pipeline stage (stages send unlike numbers of messages). Ranks that only lost
their peers are not named, nor are those that wait for a message of another stage: if nobody is behind and some wait,
it is for the stages where none does. A host waits for messages of gloo, not for those of NCCL.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.core import env
from megatron.core.errors import USER_ERRORS, RankFailure
from megatron.core.utils.collectives import device_waits, last_collective
from megatron.core.utils.groups import group_rank
from megatron.core.utils.logging import get_logger, get_rank, get_world_size
from megatron.training.callbacks.base import Callback
from megatron.training.train_state import StepResult, TrainingRun

logger = get_logger(__name__)

INTERVAL_S = 1.0
BEATS_TO_WATCH = 4
"""A rank that posts nothing during so many intervals is silent."""
STORE_TIMEOUT_S = 10.0
MAX_NAMED = 16
VICTIM = "lost its peers"


@dataclass(frozen=True)
class Sign:
    """What one rank posted last."""

    rank: int
    beat: int = -1
    step: int = 0
    phase: str = "start"
    operation: str = "none"
    group: str = "none"
    count: int = 0
    """collectives begun"""
    time: float = 0.0
    """seconds of the rank's clock"""
    failure: str = ""
    """empty while it runs, VICTIM, or its own error"""
    stage: int = 0
    """pipeline rank"""
    is_waiting: bool = False
    """for a message of another stage"""

    def describe(self, now: float) -> str:
        """One line of the report."""
        if self.beat < 0:
            return f"rank {self.rank}: gave no sign of life since the start"
        where = f"step {self.step} ({self.phase}), {self.operation} over {self.group}, collective {self.count}"
        failure = f"; it left with {self.failure}" if self.failure not in ("", VICTIM) else ""
        return f"rank {self.rank}: {where}, last sign of life {max(0.0, now - self.time):.1f} s ago{failure}"


def open_store() -> dist.Store | None:
    """Connect to the store of the launcher; None in a process that is alone."""
    host, port = env.master_addr(), env.master_port()
    if get_world_size() == 1 or host is None or port is None:
        return None
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(f"heartbeat/{env.restart_count()}", client)


def ranks_behind(before: list[Sign], after: list[Sign]) -> list[Sign]:
    """Those to blame, from two looks at all ranks that are several beats apart; none if all stand at one place."""
    left = [sign for sign in after if sign.failure not in ("", VICTIM)]
    silent = [new for old, new in zip(before, after, strict=True) if old.beat == new.beat and not new.failure]
    if left or silent:
        return left + silent
    furthest: dict[int, tuple[int, int]] = {}
    for sign in after:
        furthest[sign.stage] = max(furthest.get(sign.stage, (0, 0)), (sign.step, sign.count))
    waiting_stages = {sign.stage for sign in after if sign.is_waiting}
    behind = [s for s in after if not s.is_waiting and (s.step, s.count) < furthest[s.stage]]
    if behind or not waiting_stages:
        return behind
    return [sign for sign in after if sign.stage not in waiting_stages and not sign.failure]


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective broke off: torch's own types, or gloo's RuntimeError, which names its source file."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


class Heartbeat(Callback):
    """Posts for this rank and reports on the others; as a callback it learns step and phase."""

    def __init__(self, store: dist.Store | None, collective_timeout_s: float) -> None:
        self.step, self.phase, self.failure, self.stage = 0, "start", "", 0
        self._store = store
        self._stall_s = collective_timeout_s / 2
        self._beat = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, name="heartbeat", daemon=True)

    def on_step_start(self, run: TrainingRun) -> None:
        self.step, self.phase, self.stage = run.state.iteration + 1, "step", group_rank(run.pg_collection.pp)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self.phase = "after the step"

    def on_evaluate_start(self, run: TrainingRun) -> None:
        self.phase = "evaluation"

    def on_evaluate_end(self, run: TrainingRun) -> None:
        self.phase = "after the evaluation"

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Beat while the block runs; a collective that broke off in it becomes a RankFailure."""
        if self._store is None:
            yield
            return
        self._post()
        self._thread.start()
        try:
            yield
        except Exception as error:
            lost = device_waits.lost_peers()
            self.failure = VICTIM if lost or is_communication_error(error) else _first_line(error)
            self._post_quietly()
            if self.failure != VICTIM or isinstance(error, USER_ERRORS):
                raise
            cause = lost or f"a collective broke off ({_first_line(error)})"
            raise RankFailure(f"{cause}; {self.report()}") from error
        finally:
            self._stop.set()

    def report(self) -> str:
        """Watch all ranks for some beats and say who is behind."""
        rank = get_rank()
        try:
            before = self._read_signs()
            for _ in range(BEATS_TO_WATCH):
                time.sleep(INTERVAL_S)
                self._post()
            after = self._read_signs()
        except RuntimeError as error:
            return (
                f"rank {rank}, step {self.step}: the store of the launcher is gone ({_first_line(error)}), so the "
                "launcher, or rank 0 if that holds the store, ended first; look at its log."
            )
        mine = after[rank].describe(time.time())
        named = ranks_behind(before, after)
        if not named:
            return f"no rank is behind; {mine}"
        lines = [f"\n  {sign.describe(time.time())}" for sign in named[:MAX_NAMED]]
        more = f"\n  and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        return f"ranks behind: {', '.join(str(s.rank) for s in named)}; seen from {mine}{''.join(lines)}{more}"

    def _post(self) -> None:
        """Write the sign of this rank."""
        assert self._store is not None, "a process that is alone posts nothing"
        self._beat += 1
        last = last_collective
        place = {
            "step": self.step,
            "phase": self.phase,
            "failure": self.failure,
            "time": time.time(),
            "stage": self.stage,
        }
        communication = {"operation": last.operation, "group": last.group, "count": last.count}
        communication["is_waiting"] = last.waits_for_message
        sign = Sign(get_rank(), self._beat, **place, **communication)
        self._store.set(str(sign.rank), json.dumps(asdict(sign)))

    def _post_quietly(self) -> bool:
        """Write the sign; whether the store still answers."""
        try:
            self._post()
        except RuntimeError:
            return False
        return True

    def _read_signs(self) -> list[Sign]:
        """The last signs of all ranks."""
        assert self._store is not None, "a process that is alone has no store"
        ranks = range(get_world_size())
        known = [rank for rank in ranks if self._store.check([str(rank)])]
        texts = dict(zip(known, self._store.multi_get([str(rank) for rank in known]), strict=True))
        return [Sign(**json.loads(texts[rank])) if rank in texts else Sign(rank) for rank in ranks]

    def _beat_until_stopped(self) -> None:
        """Body of the thread."""
        place, since, is_reported = (0, "", 0), time.monotonic(), False
        while not self._stop.wait(INTERVAL_S) and self._post_quietly():
            here = (self.step, self.phase, last_collective.count)
            if here != place:
                place, since, is_reported = here, time.monotonic(), False
            elif time.monotonic() - since > self._stall_s and not is_reported:
                is_reported = True
                logger.warning("no progress for %.0f s; %s", time.monotonic() - since, self.report())


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
