"""Notices a signal at once, and bounds the time until all ranks have agreed on it.

A Python handler runs only between two bytecodes of the main thread. A rank that waits in a collective for one that is
gone would notice nothing, so the number of the signal also goes through a socket to a thread:

    signal ---> handler: seen = True                            (main thread, when it runs Python again)
           `--> wake-up socket -> thread: seen = True, then waits until settle(), or calls give_up()
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron.core.utils.collectives import last_collective

POLL_S = 0.05


class SignalWatch:
    """Catches `signum` between `start` and `stop`.

    Args:
        signum: the signal.
        patience_s: how long after the signal this rank may neither settle nor begin another collective.
        give_up: called in the thread when that time is over; None waits for ever.
    """

    def __init__(self, signum: int, patience_s: Callable[[], float], give_up: Callable[[], None] | None) -> None:
        self.signum = signum
        self.is_seen = False
        self._patience_s = patience_s
        self._give_up = give_up
        self._settled = threading.Event()
        self._previous_handler: Any = None
        self._previous_fd = -1
        self._reader, self._writer = socket.socketpair()

    def start(self) -> None:
        """Install the handler; main thread only."""
        self._writer.setblocking(False)
        self._previous_handler = signal.signal(self.signum, self._on_signal)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signal-watch", daemon=True).start()

    def settle(self) -> None:
        """All ranks know: no bound any more."""
        self._settled.set()

    def stop(self) -> None:
        """Put back what was there before."""
        self._settled.set()
        signal.set_wakeup_fd(self._previous_fd)
        signal.signal(self.signum, self._previous_handler)
        with contextlib.suppress(OSError):
            self._writer.shutdown(socket.SHUT_RDWR)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.is_seen = True

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            if self.signum in numbers:
                self.is_seen = True
                self._await_agreement()
        self._reader.close()
        self._writer.close()

    def _await_agreement(self) -> None:
        """Wait for `settle`; every collective that begins is a sign of progress and starts the time anew."""
        since, count = time.monotonic(), last_collective.count
        while not self._settled.wait(POLL_S):
            if last_collective.count != count:
                since, count = time.monotonic(), last_collective.count
            elif self._give_up is not None and time.monotonic() - since > self._patience_s():
                self._give_up()
                return
