"""The list of gates: name -> function from a parsed checkout to its violations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.unit_tests.architecture import gates_docs, gates_imports, gates_names, gates_size, gates_state, policy
from tests.unit_tests.architecture.source import Finding, Tree

GATES: dict[str, Callable[[Tree], list[Finding]]] = {
    "file": gates_size.files,
    "function": gates_size.functions,
    "complexity": gates_size.complexity,
    "parameters": gates_size.parameters,
    "layers": gates_imports.layers,
    "global": gates_state.global_statements,
    "class attributes": gates_state.class_attributes,
    "optional imports": gates_imports.optional_imports,
    "environment": gates_imports.environment,
    "names of choices": gates_names.choices,
    "lifetimes": gates_state.lifetimes,
    "dead knobs": gates_names.dead_knobs,
    "output and excepts": gates_names.output_and_excepts,
    "words": gates_names.words,
    "shapes": gates_docs.shapes,
    "readmes": gates_docs.readmes,
    "paths": gates_docs.paths,
}


@dataclass(frozen=True)
class Waiver:
    """One line of the waiver file: `path | gate | reason`."""

    path: str
    gate: str
    reason: str


def read_waivers(file: Path) -> list[Waiver]:
    """Parse the waiver file; a malformed line, an unknown gate and a missing reason are errors."""
    waivers = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 3 or parts[1] not in GATES or not parts[2]:
            raise ValueError(f"{file.name}:{number}: write `path | gate | reason` with one of {', '.join(GATES)}")
        waivers.append(Waiver(*parts))
    if len(waivers) > policy.WAIVERS:
        raise ValueError(f"{file.name}: {len(waivers)} waivers, at most {policy.WAIVERS}; mend one before adding one")
    return waivers


def unwaived(gate: str, findings: list[Finding], waivers: list[Waiver]) -> list[Finding]:
    """Drop the findings that a waiver covers."""
    covered = {waiver.path for waiver in waivers if waiver.gate == gate}
    return [finding for finding in findings if finding.path not in covered]


def unused(tree: Tree, waivers: list[Waiver]) -> list[Waiver]:
    """Waivers that cover nothing any more."""
    return [
        waiver for waiver in waivers if not any(finding.path == waiver.path for finding in GATES[waiver.gate](tree))
    ]
