"""Render docs/claims.md: each claim, the tests that fail without it, and when those last ran on a CPU and on a GPU.

    python tools/claims.py            write docs/claims.md
    python tools/claims.py --check    exit 1 if the file is not what would be written

Claims stand in docs/claims.yaml, outcomes in docs/evidence/*.json (written by pytest with `--evidence NAME`). A record
counts as a GPU run if its environment names an accelerator. Of each test the newest run on its kind of machine counts;
the worst outcome of a claim's tests is shown, with the oldest of these runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
NEVER = "never run"
NO_TEST = "no test"
GPU_TESTS = "tests/gpu_tests/"
NOT_YET = "not yet"
CLAIM_KEYS = {"id", "text", "tests"}
FAULT_KEYS = {"id", "text", "fix", "tests", "undone"}


class ClaimsError(ValueError):
    """docs/claims.yaml or a record is not what this tool can render."""


@dataclass(frozen=True)
class Record:
    """One file of docs/evidence."""

    name: str
    date: str
    commit: str
    is_dirty: bool
    accelerator: str | None
    outcomes: dict[str, dict[str, Any]]


def read_records(folder: Path) -> list[Record]:
    """Read every record, the newest first."""
    records = []
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        try:
            accelerator = data["environment"]["accelerator"]
            fields = (data["date"], data["commit"], data["dirty"], accelerator, data["outcomes"])
        except (KeyError, TypeError) as error:
            raise ClaimsError(f"{file.name}: lacks {error}; record it again with pytest --evidence") from error
        records.append(Record(file.stem, *fields))
    return sorted(records, key=lambda record: record.date, reverse=True)


def read_claims(file: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read and check docs/claims.yaml; return (claims, faults)."""
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    claims, faults = data.get("claims") or [], data.get("faults") or []
    seen: set[str] = set()
    for entry, allowed in [*((claim, CLAIM_KEYS) for claim in claims), *((fault, FAULT_KEYS) for fault in faults)]:
        name = entry.get("id", "?")
        if unknown := set(entry) - allowed:
            raise ClaimsError(
                f"{name}: unknown key {', '.join(sorted(unknown))}; known are {', '.join(sorted(allowed))}"
            )
        if name in seen or not entry.get("id") or not entry.get("text"):
            raise ClaimsError(f"{name}: an entry needs a text and an id of its own")
        seen.add(name)
    for claim in claims:
        if not claim.get("tests"):
            raise ClaimsError(f"{claim['id']}: a claim names at least one test; drop it or write one")
    return claims, faults


def missing_tests(root: Path, entries: list[dict[str, Any]]) -> list[str]:
    """Return the named tests that do not exist, as `id: test`."""
    return [
        f"{entry['id']}: {test}" for entry in entries for test in entry.get("tests") or [] if not _exists(root, test)
    ]


def _exists(root: Path, test: str) -> bool:
    path, _, names = test.partition("::")
    file = root / path
    if not file.is_file():
        return False
    scope: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for name in names.split("::"):
        found = [item for item in ast.iter_child_nodes(scope) if getattr(item, "name", None) == name]
        if not found:
            return False
        scope = found[0]
    return True


def last_run(tests: list[str], records: list[Record], on_gpu: bool) -> str:
    """Describe the newest runs of those tests that are for one kind of machine: worst outcome, oldest of these runs."""
    tests = [test for test in tests if test.startswith(GPU_TESTS) == on_gpu]
    runs = {}
    for test in tests:
        found = (record for record in records if bool(record.accelerator) == on_gpu and test in record.outcomes)
        runs[test] = next(found, None)
    known = {test: record for test, record in runs.items() if record is not None}
    if not known:
        return NEVER if tests else NO_TEST
    outcomes = [record.outcomes[test]["outcome"] for test, record in known.items()]
    outcome = next((item for item in outcomes if item != "passed"), "passed")
    oldest = min(known.values(), key=lambda record: record.date)
    commit = oldest.commit[:10] + ("+" if any(record.is_dirty for record in known.values()) else "")
    missing = f", {len(tests) - len(known)} of {len(tests)} tests {NEVER}" if len(known) < len(tests) else ""
    return f"{outcome} {oldest.date} {commit}{missing}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _tests(tests: list[str]) -> str:
    return "<br>".join(f"`{test}`" for test in tests)


def render(claims: list[dict[str, Any]], faults: list[dict[str, Any]], records: list[Record]) -> str:
    """Return the text of docs/claims.md."""
    lines = [
        "# Claims",
        "",
        "Written by `tools/claims.py` from `docs/claims.yaml` and `docs/evidence/`; change those and run `make docs`.",
        "Of each test the newest run counts: shown are the worst outcome and the oldest date and commit of a claim's",
        "tests on a CPU, and of those in `tests/gpu_tests`; a `+` behind the commit means that files differed from it.",
        "",
        "| claim | tests that fail without it | last CPU run | last GPU run |",
        "|---|---|---|---|",
    ]
    for claim in claims:
        tests = claim["tests"]
        runs = [last_run(tests, records, on_gpu) for on_gpu in (False, True)]
        lines.append(f"| {_cell(claim['text'])} | {_tests(tests)} | {runs[0]} | {runs[1]} |")
    lines += [
        "",
        "## Faults that must stay fixed",
        "",
        "| | fault | fix | tests | output with the fix undone |",
        "|---|---|---|---|---|",
    ]
    for fault in faults:
        fix = f"`{fault['fix']}`" if fault.get("fix") else NOT_YET
        tests = _tests(fault.get("tests") or []) or NOT_YET
        undone = _cell(fault.get("undone") or NOT_YET)
        lines.append(f"| {fault['id']} | {_cell(fault['text'])} | {fix} | {tests} | {undone} |")
    return "\n".join(lines) + "\n"


def build(root: Path) -> str:
    """Read everything below `root` and return the text; names that do not exist are errors."""
    claims, faults = read_claims(root / "docs" / "claims.yaml")
    absent = missing_tests(root, [*claims, *faults])
    absent += [
        f"{fault['id']}: {fault['fix']}" for fault in faults if fault.get("fix") and not (root / fault["fix"]).is_file()
    ]
    if absent:
        raise ClaimsError("docs/claims.yaml names what does not exist: " + "; ".join(absent))
    return render(claims, faults, read_records(root / "docs" / "evidence"))


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check docs/claims.md; return the exit code."""
    parser = argparse.ArgumentParser(description="Render docs/claims.md from docs/claims.yaml and docs/evidence.")
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if the file is out of date")
    options = parser.parse_args(argv)
    target = root / "docs" / "claims.md"
    try:
        text = build(root)
    except ClaimsError as error:
        print(f"ClaimsError: {error}", file=sys.stderr)
        return 2
    if not options.check:
        target.write_text(text, encoding="utf-8")
        return 0
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        print("docs/claims.md is out of date; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
