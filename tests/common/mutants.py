"""Faults put in on purpose: each undoes one fix or deletes one call, so that a test can show that it is caught.

    with replaced(finalize_module, "apply_step_counts", lambda *_: None):
        with pytest.raises(AssertionError):
            compare()

A mutant names the seam by module or object and attribute; files are never edited. In a job of the pool the mutant is
entered inside the job, because each worker has modules of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, substitute: Any) -> Iterator[None]:
    """Bind `owner.name` to `substitute` inside the block; fails if there is nothing to replace."""
    original = vars(owner).get(name, getattr(owner, name))
    was_own = name in vars(owner)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def deleted_call(owner: Any, name: str, result: Any = None) -> Iterator[list[int]]:
    """Turn `owner.name(...)` into nothing that returns `result`; yields the number of calls as a list of one.

    Fails when the block ends without such a call: a mutant that never runs proves nothing.
    """
    calls = [0]

    def nothing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return result

    with replaced(owner, name, nothing):
        yield calls
    assert calls[0] > 0, f"{name} was never called: the mutant proves nothing"


@contextmanager
def scaled_result(owner: Any, name: str, factor: float) -> Iterator[None]:
    """Multiply what `owner.name(...)` returns, a tensor or number, by `factor`: a wrong divisor."""
    original: Callable[..., torch.Tensor | float] = getattr(owner, name)

    def scaled(*args: Any, **kwargs: Any) -> torch.Tensor | float:
        return original(*args, **kwargs) * factor

    with replaced(owner, name, scaled):
        yield
