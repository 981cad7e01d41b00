#!/usr/bin/env python3
"""Print and draw the pipeline schedule of a launch line.

    python tools/show_schedule.py --pipeline-model-parallel-size 4 --global-batch-size 8 --num-layers 8
    python tools/show_schedule.py <flags of pretrain_gpt.py> [--world-size N] [--png schedule.png]

Time is in units of one chunk's forward; a backward takes two, messages take none. What the schedule does not depend on
(data, tokenizer, widths, learning rate) may be left out.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.core import env  # noqa: E402
from megatron.core.errors import USER_ERRORS, exit_code  # noqa: E402
from megatron.core.pipeline_layout import stage_layers  # noqa: E402
from megatron.core.pipeline_parallel.actions import Action, ActionKind, PlanShape  # noqa: E402
from megatron.core.pipeline_parallel.plan_checks import check_schedule  # noqa: E402
from megatron.core.pipeline_parallel.plans import PLANS, build_plans  # noqa: E402
from megatron.core.pipeline_parallel.schedules import plan_name  # noqa: E402
from megatron.core.pipeline_parallel.timeline import Span, bubble, make_timeline  # noqa: E402
from megatron.training.argument_factory import build_parser, read_command_line  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, fill_defaults, parse_args  # noqa: E402
from megatron.training.check_config import smallest_world  # noqa: E402

FILLERS = {
    "--mock-data": "--mock-data",
    "--tokenizer-type": "--tokenizer-type NullTokenizer --vocab-size 128",
    "--lr": "--lr 1",
    "--train-iters": "--train-iters 1",
    "--micro-batch-size": "--micro-batch-size 1",
    "--seq-length": "--seq-length 1024 --max-position-embeddings 1024",
    "--hidden-size": "--hidden-size 64",
    "--num-attention-heads": "--num-attention-heads 8",
    "--transformer-impl": "--transformer-impl local",
}
"""Flags that any line needs though no schedule depends on them."""
REPLACED_BY = {
    "--mock-data": ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path"),
    "--train-iters": ("--train-samples",),
}
PAIR_GAP, STRIP = 0.04, 0.3
COLORS = {
    ActionKind.FORWARD: ("forward", (0.30, 0.50, 0.85)),
    ActionKind.RECOMPUTE: ("forward again", (0.55, 0.40, 0.75)),
    ActionKind.BACKWARD: ("backward", (0.25, 0.65, 0.40)),
    ActionKind.WGRAD: ("weight gradients after the message", (0.90, 0.60, 0.15)),
}


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """Parse a launch line, in the world it names or the smallest that its parallel sizes allow."""
    given = list(words)
    for flag, filler in FILLERS.items():
        if not any(word == name for word in words for name in (flag, *REPLACED_BY.get(flag, ()))):
            given += filler.split()
    parser = build_parser(None)
    draft = fill_defaults(parser, read_command_line(parser, given))
    world = draft.world_size or smallest_world(draft)
    if draft.world_size is not None:
        position = given.index("--world-size")
        del given[position : position + 2]
    env.set_default("WORLD_SIZE", str(world))
    return parse_args(given)


def describe(args: argparse.Namespace) -> tuple[str, PlanShape]:
    """Name of the schedule, and what it depends on."""
    shape = PlanShape(
        num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        pp_size=args.pipeline_model_parallel_size,
        microbatch_group_size=args.microbatch_group_size_per_vp_stage,
        delays_wgrad=args.delay_wgrad_compute,
    )
    overlapped = f"{plan_name(shape)}_overlap"
    return (overlapped if args.overlap_moe_expert_parallel_comm else plan_name(shape)), shape


def report(name: str, shape: PlanShape, layers: Sequence[range]) -> str:
    """Stages, lists, times, bubble and peaks as text."""
    plans = build_plans(name, replace(shape, pp_rank=0))
    peaks = check_schedule(name, shape)
    spans = make_timeline(plans, shape)
    lines = [f"{name}: {shape.pp_size} ranks, {shape.num_chunks} chunks each, {shape.num_microbatches} microbatches"]
    for rank, plan in enumerate(plans):
        held = [layers[chunk * shape.pp_size + rank] for chunk in range(shape.num_chunks)]
        named = ", ".join(" ".join(map(str, part)) or "none" for part in held)
        declared = PLANS[name].peak_in_flight(replace(shape, pp_rank=rank))
        lines += [f"rank {rank}: layers {named}; at most {peaks[rank]} in flight (declared {declared})"]
        lines += ["  " + " ".join(map(str, plan))]
    end = max(span.end for rank in spans for span in rank)
    lines.append(f"end after {end} forwards' time, bubble {bubble(spans):.1%}")
    return "\n".join(lines)


def draw(name: str, shape: PlanShape, path: Path) -> None:
    """Draw one row for each rank, a color for each kind of work, later chunks darker, and save the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = make_timeline(build_plans(name, replace(shape, pp_rank=0)), shape)
    end = max(span.end for rank in spans for span in rank)
    figure, axes = pyplot.subplots(
        layout="constrained", figsize=(min(max(8.0, 0.28 * end), 40.0), 0.6 * shape.pp_size + 1.8)
    )
    for rank, timed in enumerate(spans):
        for span in timed:
            _draw_span(axes, rank, span, shape)
    axes.set_xlim(0, end)
    axes.set_ylim(shape.pp_size - 0.5, -0.5)
    axes.set_yticks(range(shape.pp_size), [f"rank {rank}" for rank in range(shape.pp_size)])
    axes.set_xlabel("time in forwards of one chunk")
    axes.set_title(f"{name}: {shape.num_microbatches} microbatches, bubble {bubble(spans):.1%}")
    kinds = {part.kind for rank in spans for span in rank for part in span.action.parts}
    _draw_legend(figure, [kind for kind in COLORS if kind in kinds], shape)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_legend(figure: Any, kinds: Sequence[ActionKind], shape: PlanShape) -> None:
    """Say what the colors mean, in one line under the picture; of many chunks the first and the last."""
    from matplotlib.patches import Patch

    patches = []
    for kind in kinds:
        for chunk in sorted({0, shape.num_chunks - 1} if shape.num_chunks > 2 else range(shape.num_chunks)):
            label = f"{COLORS[kind][0]}, chunk {chunk}" if shape.num_chunks > 1 else COLORS[kind][0]
            patches.append(Patch(color=_color(Action(kind, chunk, 0), shape), label=label))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)


def _draw_span(axes: Any, rank: int, span: Span, shape: PlanShape) -> None:
    """A box with the microbatch in it; a pair is two boxes, one above the other.

    What takes no time of its own, weight gradients after a backward, is a strip at the end of that backward.
    """
    parts, width = span.action.parts, span.end - span.start
    height = 0.9 / max(len(parts), 1 if width else 2)
    for row, part in enumerate(parts):
        bottom = rank - 0.45 + row * height if width else rank
        start, shown = (span.start, width - PAIR_GAP) if width else (span.start - STRIP - PAIR_GAP, STRIP)
        axes.broken_barh([(start, shown)], (bottom, height - PAIR_GAP), facecolors=_color(part, shape))
        if width:
            middle = (start + span.end) / 2
            axes.text(middle, bottom + height / 2, part.microbatch, ha="center", va="center", fontsize=7, color="white")


def _color(part: Action, shape: PlanShape) -> tuple[float, float, float]:
    red, green, blue = COLORS[part.kind][1]
    shade = 1.0 - 0.5 * part.chunk / max(shape.num_chunks - 1, 1)
    return red * shade, green * shade, blue * shade


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    own = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    own.add_argument("--png", type=Path, help="draw the schedule into this file (needs matplotlib)")
    options, words = own.parse_known_args(argv)
    try:
        args = read_flags(words)
        name, shape = describe(args)
        layers = stage_layers(core_transformer_config_from_args(args))
        sys.stdout.write(report(name, shape, layers) + "\n")
    except USER_ERRORS as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return exit_code(error)
    if options.png is not None:
        try:
            draw(name, shape, options.png)
        except OSError as error:
            sys.stderr.write(f"--png {options.png}: cannot be written ({error}); name a file in a folder that exists\n")
            return 2
        sys.stdout.write(f"drawn into {options.png}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
