"""The exceptions that a user can cause, each with one meaning.

Their text has the form `field=value: constraint; remedy`. The command line catches them, prints the message without a
traceback and leaves with `exit_code(error)`; everything else is a fault of this tree and keeps its traceback.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """What was asked for does not fit together; raised before any device or process group is touched."""


class MissingDependencyError(ImportError):
    """An optional package was asked for and is not installed; the message names the step that installs it."""


class CheckpointError(RuntimeError):
    """Files on disk do not fit the model, the layout or each other."""


class DataError(ValueError):
    """A dataset, index or tokenizer file is missing, truncated, foreign or empty."""


class RankFailure(RuntimeError):
    """Another rank died, hangs or left with an error of its own; the message names it."""


class DivergenceError(RuntimeError):
    """A loss or a gradient is NaN or infinite; nothing was updated with it."""


class StreamOrderError(RuntimeError):
    """--check-streams found work or memory used without order, or ranks that communicate differently."""


USER_ERRORS: tuple[type[Exception], ...] = (
    ConfigError,
    MissingDependencyError,
    CheckpointError,
    DataError,
    RankFailure,
    DivergenceError,
    StreamOrderError,
)


def exit_code(error: BaseException) -> int:
    """Return the process exit code for an error: 2 for the configuration, 1 for everything else."""
    return 2 if isinstance(error, ConfigError) else 1
