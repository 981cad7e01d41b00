"""Triton kernels on a CPU: jobs that run in a worker process where Triton interprets kernels instead of compiling them.

    def copy_job(rows):                 a function at module level; arguments and result are pickled
        return kernel_launcher(rows)    kernels of the tree are interpreted here, on CPU tensors

    def test_copy(interpreted):
        assert torch.equal(interpreted(copy_job, rows), rows)

Triton decides when a kernel is defined, so the variable has to stand before the first import: hence another process,
one for all tests of a run. The same job, called directly, compiles the kernels on a GPU. Keep shapes small: a program
of a kernel costs about a millisecond. What the interpreter computes differently: see `megatron/core/fusions/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.common.pool import WorkerPool

ENVIRONMENT = {"TRITON_INTERPRET": "1"}


class Interpreter:
    """Calls functions in the process where kernels are interpreted."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def __call__(self, job: Callable[..., Any], *args: Any, deadline_s: float = 30.0) -> Any:
        """Return `job(*args)`, computed there; a failure raises RankErrors with its traceback."""
        return self.ranks(job, *args, world_size=1, deadline_s=deadline_s)[0]

    def ranks(self, job: Callable[..., Any], *args: Any, world_size: int = 2, deadline_s: float = 30.0) -> list[Any]:
        """The results of `job(*args)` on the ranks of a gloo world, each of which interprets kernels."""
        return self._pool.run(job, *args, world_size=world_size, deadline_s=deadline_s)
