"""The calls that order streams and keep memory, one by one, so that a test can make each of them a no-op in turn.

Found by their syntax: `streams.wait(...)`, `.hold`, `.release`, `.record`, `.join`, and the `.wait()` of a collective's
handle, in the packages that hand work from one stream to another. A call is known by file, function and its number
among equal ones in that function, which an edit elsewhere does not change.
"""

import ast
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import streams
from megatron.core.stream_check.collectives import CollectiveStreams
from megatron.core.streams import Event, Role
from tests.common.mutants import replaced

CORE = Path(streams.__file__).parent
PACKAGES = ("pipeline_parallel", "transformer/moe", "distributed")
STREAM_CALLS = ("hold", "join", "record", "release", "wait")
HANDLE_WAIT = "handle.wait"


@dataclass(frozen=True)
class CallSite:
    """One call in the source."""

    file: str
    """below megatron/core"""
    function: str
    call: str
    """a function of `core/streams`, or `handle.wait`"""
    index: int
    """among the equal calls of the function, from 0"""
    lines: tuple[int, int]
    """first and last line"""

    def __str__(self) -> str:
        return f"{self.file}::{self.function}::{self.call}[{self.index}]"

    def is_caller(self, frame: Any) -> bool:
        """True if `frame` stands at this call."""
        is_line = self.lines[0] <= frame.f_lineno <= self.lines[1]
        return is_line and frame.f_code.co_filename == str(CORE / self.file)


def find_call_sites() -> list[CallSite]:
    """All of them, in the order of files and lines."""
    found: list[CallSite] = []
    for package in PACKAGES:
        for path in sorted((CORE / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    found += _sites_of(str(path.relative_to(CORE)), function)
    return found


def _sites_of(file: str, function: ast.FunctionDef) -> list[CallSite]:
    sites: list[CallSite] = []
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    unused = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        call = _kind_of(node, id(node) in unused)
        if call is not None:
            index = sum(site.call == call for site in sites)
            sites.append(CallSite(file, function.name, call, index, (node.lineno, node.end_lineno or node.lineno)))
    return sites


def _kind_of(node: ast.Call, is_statement: bool) -> str | None:
    """What is called; a `wait` that returns something, such as counts on the host, cannot be left out."""
    assert isinstance(node.func, ast.Attribute), f"line {node.lineno}: no attribute is called"
    name, owner = node.func.attr, node.func.value
    if isinstance(owner, ast.Name) and owner.id == "streams":
        return name if name in STREAM_CALLS else None
    return HANDLE_WAIT if name == "wait" and is_statement and not node.args else None


@contextlib.contextmanager
def deleted(site: CallSite) -> Iterator[None]:
    """Let one call do nothing. A handle is waited for all the same, as gloo needs, but nobody learns of it."""
    with _intercepted([site], is_deleted=True, seen=set()):
        yield


@contextlib.contextmanager
def noted(sites: Sequence[CallSite], seen: set[CallSite]) -> Iterator[None]:
    """Put into `seen` which of the calls are made."""
    with _intercepted(sites, is_deleted=False, seen=seen):
        yield


@contextlib.contextmanager
def _intercepted(sites: Sequence[CallSite], is_deleted: bool, seen: set[CallSite]) -> Iterator[None]:
    def is_stopped(name: str, frame: Any) -> bool:
        here = [site for site in sites if site.call == name and site.is_caller(frame)]
        seen.update(here)
        return is_deleted and bool(here)

    def substitute(name: str) -> Any:
        plain = getattr(streams, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_stopped(name, sys._getframe(1)):
                return plain(*args, **kwargs)
            return Event(streams.current_role(), dict.fromkeys(Role, 0)) if name == "record" else None

        return call

    plain_wait = CollectiveStreams._on_wait

    def on_wait(self: CollectiveStreams, handle: Any) -> None:
        if not is_stopped(HANDLE_WAIT, sys._getframe(2)):
            plain_wait(self, handle)

    with contextlib.ExitStack() as stack:
        for name in STREAM_CALLS:
            stack.enter_context(replaced(streams, name, substitute(name)))
        stack.enter_context(replaced(CollectiveStreams, "_on_wait", on_wait))
        yield
