"""Functional test cases: what a `model_config.yaml` says, the command line it stands for, and the launch.

A case is a folder `test_cases/<model>/<case>/` with `model_config.yaml` in Megatron's format and golden values beside
it. `${NAME}` in a value is replaced by a path of the run: DATA_PATH (the preprocessed corpus), DATA_CACHE_PATH,
OUTPUT_PATH.

TEST_TYPE says what is launched:
    regular       once
    ckpt-resume   once with a save at half of the iterations, then from that save to the end again (with MODEL_ARGS_2
                  instead, if given); both halves must be equal
    curve         once, over so many steps that last bits decide each of them: only its end is the same elsewhere
Types that begin from a stored checkpoint are not there: none is shipped.

TIER says when: normal (with every change) or full (with the whole matrices).
"""

from __future__ import annotations

import os
import shutil
import string
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "test_cases"
CORPUS = ROOT / "examples" / "data" / "kjv_genesis_ruth.txt"
TEST_TYPES = {"regular": 1, "ckpt-resume": 2, "curve": 1}
"""Test type -> number of launches."""
TIERS = ("normal", "full")
CHECKPOINTS = "checkpoints"
"""Where a case saves, below OUTPUT_PATH."""
LAUNCH_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Case:
    """One case as its file states it."""

    folder: Path
    model_args: dict[str, Any]
    env_vars: dict[str, str] = field(default_factory=dict)
    test_type: str = "regular"
    tier: str = "normal"
    metrics: tuple[str, ...] = ("lm loss", "num-zeros")
    num_processes: int = 1
    model_args_2: dict[str, Any] | None = None
    """Arguments of the second run, if they differ."""

    @property
    def num_launches(self) -> int:
        """How often the launcher is started."""
        return TEST_TYPES[self.test_type]

    @property
    def half(self) -> int:
        """The iteration after which a resumed run goes on."""
        return int(self.model_args["--train-iters"]) // 2

    @property
    def name(self) -> str:
        """`<model>/<case>`."""
        return f"{self.folder.parent.name}/{self.folder.name}"


def load_case(folder: Path) -> Case:
    """Read a case; raises ValueError for keys and test types that this runner does not know."""
    stated = yaml.safe_load((folder / "model_config.yaml").read_text(encoding="utf-8"))
    known = {"ENV_VARS", "MODEL_ARGS", "TEST_TYPE", "METRICS", "NUM_PROCESSES", "MODEL_ARGS_2", "TIER"}
    unknown = sorted(set(stated) - known)
    if unknown:
        raise ValueError(f"{folder}: unknown keys {unknown}; known are {sorted(known)}.")
    case = Case(
        folder=folder,
        model_args=stated["MODEL_ARGS"],
        env_vars={key: str(value) for key, value in stated.get("ENV_VARS", {}).items()},
        test_type=stated.get("TEST_TYPE", "regular"),
        tier=stated.get("TIER", "normal"),
        metrics=tuple(stated.get("METRICS", Case.metrics)),
        num_processes=stated.get("NUM_PROCESSES", 1),
        model_args_2=stated.get("MODEL_ARGS_2"),
    )
    if case.test_type not in TEST_TYPES:
        raise ValueError(f"{folder}: TEST_TYPE {case.test_type!r}; known are {', '.join(TEST_TYPES)}.")
    if case.tier not in TIERS:
        raise ValueError(f"{folder}: TIER {case.tier!r}; known are {', '.join(TIERS)}.")
    return case


def find_cases(names: list[str] | None = None) -> list[Case]:
    """Return the named cases, or all; raises ValueError with the known names for an unknown one."""
    cases = {case.name: case for case in map(load_case, sorted(p.parent for p in CASES.glob("*/*/model_config.yaml")))}
    unknown = sorted(set(names or []) - set(cases))
    if unknown:
        raise ValueError(f"no case {', '.join(unknown)}; known are {', '.join(cases)}.")
    return [cases[name] for name in (names or cases)]


def command_words(model_args: dict[str, Any], paths: dict[str, str]) -> list[str]:
    """Turn MODEL_ARGS into words: true is a bare flag, false or null leaves it out, a list gives several words."""
    words: list[str] = []
    for flag, value in model_args.items():
        if value is None or value is False:
            continue
        words.append(flag)
        if value is not True:
            entries = value if isinstance(value, list) else [value]
            words += [string.Template(str(entry)).substitute(paths) for entry in entries]
    return words


def prepare_corpus(folder: Path) -> Path:
    """Preprocess the shipped text once per folder; returns the prefix of its files."""
    prefix = folder / "corpus"
    document = Path(f"{prefix}_text_document")
    if not document.with_name(document.name + ".idx").exists():
        run_python(
            [
                *("tools/preprocess_data.py", "--input", str(CORPUS), "--output-prefix", str(prefix)),
                *("--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"),
            ]
        )
    return document


def run_python(words: list[str], env_vars: dict[str, str] | None = None) -> str:
    """Run Python in the repository's root and return its output; raises RuntimeError with it if it fails."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env_vars or {})}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LAUNCH_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(words)}\n{done.stdout[-4000:]}")
    return done.stdout


def torchrun_words(num_processes: int) -> list[str]:
    """The words before the script that start it in `num_processes` processes of this host, without DNS."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*launcher, "--nproc-per-node", str(num_processes)]


def launch(case: Case, work: Path, is_second: bool = False) -> str:
    """Run a case through torchrun once and return its log."""
    work.mkdir(parents=True, exist_ok=True)
    paths = {
        "DATA_PATH": str(prepare_corpus(work.parent)),
        "DATA_CACHE_PATH": str(work / "cache"),
        "OUTPUT_PATH": str(work),
    }
    words = command_words(case.model_args_2 if is_second and case.model_args_2 else case.model_args, paths)
    log = run_python([*torchrun_words(case.num_processes), "pretrain_gpt.py", *words], case.env_vars)
    (work / ("resumed.log" if is_second else "run.log")).write_text(log, encoding="utf-8")
    return log


def rewind(checkpoints: Path, iteration: int) -> None:
    """Remove the checkpoints after `iteration` and point the tracker to it; raises RuntimeError if it is not there."""
    if not (checkpoints / f"iter_{iteration:07d}").is_dir():
        raise RuntimeError(f"{checkpoints}: nothing was saved at iteration {iteration}; correct --save-interval.")
    for folder in checkpoints.glob("iter_*"):
        if int(folder.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(folder)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n", encoding="utf-8")
