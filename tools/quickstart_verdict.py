"""Says whether the quickstart has learned, from its log: the verdict that `make quickstart` ends with.

    python tools/quickstart_verdict.py train.log --text corpus.txt --picture loss.png

It has if the last validation loss is at most 2.0 nats per byte and at least 0.2 below the bigram entropy of the text,
which takes more context than one byte, and if in the last log line the busiest expert of the worst layer has less
than twice the mean load, which takes routing. Exit code 0 if so, else 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.corpus_stats import corpus_stats
from tools.plot_loss import build_picture, draw
from tools.run_metrics import Metrics, parse_log

MAX_LOSS = 2.0
MARGIN_BELOW_BIGRAM = 0.2
MAX_LOAD_RATIO = 2.0
LOSS, LOAD = "lm loss validation", "moe_load_imbalance_max"


@dataclass(frozen=True)
class Check:
    """One thing that must hold: a measured value and its limit."""

    name: str
    value: float
    limit: float
    is_strict: bool = False
    """The limit itself is not enough."""

    @property
    def holds(self) -> bool:
        """Whether the value keeps the limit; nan never does."""
        return self.value < self.limit if self.is_strict else self.value <= self.limit

    def __str__(self) -> str:
        sign = "<" if self.is_strict else "<="
        return f"{'ok    ' if self.holds else 'FAILED'} {self.name}: {self.value:.3f} {sign} {self.limit:.3f}"


def last_value(metrics: Metrics, name: str) -> float:
    """Return the value of the last iteration that has one; nan without any."""
    series = metrics.get(name, {})
    return series[max(series)] if series else math.nan


def judge(metrics: Metrics, bigram: float) -> list[Check]:
    """Return the checks of a finished run."""
    loss = last_value(metrics, LOSS)
    return [
        Check("validation loss (nats per byte)", loss, MAX_LOSS),
        Check(f"validation loss, {MARGIN_BELOW_BIGRAM} below the bigram entropy", loss, bigram - MARGIN_BELOW_BIGRAM),
        Check("busiest expert / mean load, worst layer", last_value(metrics, LOAD), MAX_LOAD_RATIO, is_strict=True),
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="log of the run")
    parser.add_argument("--text", type=Path, required=True, help="the text it was trained on")
    parser.add_argument("--picture", type=Path, default=None, help="PNG of the loss curve")
    args = parser.parse_args(argv)
    for path in (args.log, args.text):
        if not path.is_file():
            parser.error(f"{path}: there is no such file; run the training first, or correct the path")
    stats = corpus_stats(args.text.read_bytes())
    checks = judge(parse_log(args.log.read_text(encoding="utf-8", errors="replace")), stats["bigram"])
    print(f"text: {stats['bytes']} bytes, entropy {stats['entropy']:.3f}, bigram {stats['bigram']:.3f} nats per byte")
    for check in checks:
        print(check)
    if args.picture is not None:
        levels = {"entropy": stats["entropy"], "bigram": stats["bigram"]}
        draw(build_picture({"training": args.log}, "lm loss", levels), args.picture)
        print(f"curve: {args.picture.resolve()}")
    passed = all(check.holds for check in checks)
    print("quickstart: passed" if passed else "quickstart: FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
