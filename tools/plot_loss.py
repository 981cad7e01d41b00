"""Draws a metric of one or several runs into a PNG and prints its path.

    python tools/plot_loss.py run.log other_run/tensorboard golden.json --out loss.png
    python tools/plot_loss.py run.log --metric 'grad norm' --level 'bigram=2.30'

A run is a log, a folder of TensorBoard events, or a golden file. Validation points are drawn as dots.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.run_metrics import Series, read_run


@dataclass
class Picture:
    """What is drawn: curves and dots by label, and horizontal lines."""

    metric: str
    curves: dict[str, Series] = field(default_factory=dict)
    dots: dict[str, Series] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)


def build_picture(runs: dict[str, Path], metric: str, levels: dict[str, float]) -> Picture:
    """Collect the curve of `metric` of each run, and its validation points if there are any.

    Raises: ValueError if a run has no such metric; it names those that it has.
    """
    picture = Picture(metric, levels=levels)
    for label, path in runs.items():
        metrics = read_run(path)
        if metric not in metrics:
            raise ValueError(f"{path}: has no metric {metric!r}; it has {', '.join(sorted(metrics)) or 'none at all'}.")
        picture.curves[label] = dict(sorted(metrics[metric].items()))
        if f"{metric} validation" in metrics:
            picture.dots[f"{label}, validation"] = dict(sorted(metrics[f"{metric} validation"].items()))
    return picture


def draw(picture: Picture, out: Path) -> None:
    """Draw the picture into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, series in picture.curves.items():
        axes.plot(list(series), list(series.values()), label=label, linewidth=1.2)
    for label, series in picture.dots.items():
        axes.plot(list(series), list(series.values()), "o", label=label)
    for label, level in picture.levels.items():
        axes.axhline(level, linestyle="--", linewidth=1, color="grey")
        axes.annotate(
            f"{label} {level:.3f}", (0.99, level), xycoords=("axes fraction", "data"), ha="right", va="bottom"
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel(picture.metric)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def parse_level(text: str) -> tuple[str, float]:
    """Read NAME=VALUE."""
    name, _, value = text.rpartition("=")
    return name, float(value)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="logs, TensorBoard folders or golden files")
    parser.add_argument("--metric", default="lm loss", help="what to draw (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("loss.png"), help="PNG file (default: %(default)s)")
    parser.add_argument("--label", action="append", default=[], help="name of a run, in the order of the runs")
    parser.add_argument("--level", action="append", default=[], type=parse_level, help="horizontal line NAME=VALUE")
    args = parser.parse_args(argv)
    labels = args.label + [str(path) for path in args.runs[len(args.label) :]]
    try:
        picture = build_picture(dict(zip(labels, args.runs, strict=True)), args.metric, dict(args.level))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    draw(picture, args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
