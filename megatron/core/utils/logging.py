"""Messages to the person who watches the run: which rank speaks, and where it goes.

Two roads. `emit` writes one line to standard output as it is: for the log line and for the answers of a command, which
people parse. Everything else goes through a `logging` logger below `megatron`, so that a program which embeds this tree
keeps control of level and handlers. Neither road communicates; the rank is the one of
torch.distributed when it is initialised, else this process is the only one.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

ROOT_NAME = "megatron"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name if name.startswith(ROOT_NAME) else f"{ROOT_NAME}.{name}")


def get_rank() -> int:
    """Return the global rank, 0 before the process group exists."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks, 1 before the process group exists."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def log_single_rank(logger: logging.Logger, level: int, message: str, rank: int = 0) -> None:
    """Log on one rank only; a rank below zero counts from the last."""
    if get_rank() == rank % get_world_size():
        logger.log(level, message)


def emit(message: str, rank: int | None = 0) -> None:
    """Write one line to standard output and flush it; on one rank only, or on every rank with `rank=None`.

    The line is written with one call, so that lines of several ranks on one terminal do not mix.
    """
    if rank is None or get_rank() == rank % get_world_size():
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


class _RankFormatter(logging.Formatter):
    """Puts the rank in front when there is more than one, and the level when it is a warning or worse."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one record."""
        front = f"[rank {get_rank()}] " if get_world_size() > 1 else ""
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"{front}{level}{super().format(record)}"


def setup_logging(level: int = logging.INFO) -> None:
    """Send the records of this tree to standard error, once however often it is called; only entry points call it."""
    root = logging.getLogger(ROOT_NAME)
    root.setLevel(level)
    if not any(isinstance(handler.formatter, _RankFormatter) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_RankFormatter("%(message)s"))
        root.addHandler(handler)
        root.propagate = False
