"""Kernels that memory limits, each beside a copy: time, bytes that it has to move, share of the copy's bandwidth.

    python tools/benchmark/memory_bound.py                          the sizes of slice A
    python tools/benchmark/memory_bound.py --rows loss --sweep      also other tiles of these kernels

Bytes are those that any form must read and write once. Times are medians of replays of a CUDA graph. Written to
fused-loss.json in docs/evidence/benchmarks or --folder.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fusions import fused_cross_entropy
from megatron.core.fusions.fused_cross_entropy import VocabularyPart, logit_gradient, scan_logits
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tools.benchmark.result import ROOT, write_result

TOKENS, VOCABULARY = 16384, 38016
COPY_BYTES = 1 << 30
CALLS_PER_GRAPH, WARM_UPS, REPEATS = 3, 2, 7


@dataclass(frozen=True)
class Row:
    """One kernel at one size."""

    name: str
    call: Callable[[], Any]
    moved_bytes: int
    note: str = ""


def microseconds(call: Callable[[], Any]) -> list[float]:
    """Times of one call, from replays of a graph that holds several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    times = []
    for _ in range(WARM_UPS + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return times[WARM_UPS:]


def loss_rows(is_swept: bool) -> Iterator[Row]:
    """The cross entropy of one microbatch of slice A."""
    logits = torch.randn(TOKENS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    part, grad = VocabularyPart(0, VOCABULARY, VOCABULARY), torch.ones(TOKENS, device="cuda")
    peak, total, _ = scan_logits(logits, targets, part).unbind()
    size = logits.nbytes

    def scan() -> torch.Tensor:
        return scan_logits(logits, targets, part)

    def gradient() -> torch.Tensor:
        return logit_gradient(logits, targets, (peak, total), grad, part)

    defaults = (fused_cross_entropy.SCAN_TILE, fused_cross_entropy.NUM_WARPS)
    choices = itertools.product((4096, 8192, 16384), (4, 8, 16)) if is_swept else [defaults]
    for tile, warps in choices:
        fused_cross_entropy.SCAN_TILE = fused_cross_entropy.GRADIENT_TILE = tile
        fused_cross_entropy.NUM_WARPS = warps
        note = f"{tile} columns, {warps} warps"
        yield Row("cross entropy forward", scan, size, note)
        yield Row("cross entropy backward", gradient, 2 * size, note)
    leaf = logits.view(4096, 4, VOCABULARY).requires_grad_()
    for fuses in (True, False):

        def both(fuses: bool = fuses) -> None:
            losses = vocab_parallel_cross_entropy(leaf, targets.view(4096, 4), fuses=fuses)
            torch.autograd.grad(losses, leaf, grad.view(4096, 4))

        yield Row("cross entropy, both", both, 3 * size, "kernels" if fuses else "plain form")


def measure_copy() -> float:
    """Bytes per microsecond that a copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / statistics.median(microseconds(lambda: target.copy_(source)))


GROUPS = {"loss": loss_rows}


def main(argv: list[str] | None = None) -> int:
    """Time the rows, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--sweep", action="store_true", help="also time other tiles of the kernels")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks")
    args = parser.parse_args(argv)
    copy_rate = measure_copy()
    print(f"copy of {COPY_BYTES >> 20} MiB: {copy_rate / 1e3:.0f} GB/s")
    rows = []
    for group in args.rows:
        for row in GROUPS[group](args.sweep):
            raw_us = microseconds(row.call)
            time_us = statistics.median(raw_us)
            share = row.moved_bytes / time_us / copy_rate
            print(f"{row.name:<28}{row.note:<28}{time_us:>9.1f} us{share:>7.2f} of a copy", flush=True)
            figures = {"us": time_us, "raw_us": raw_us, "bytes": row.moved_bytes, "share_of_copy": share}
            rows.append({"name": row.name, "note": row.note, **figures})
        write_result(args.folder / "fused-loss.json", {"copy_gb_s": copy_rate / 1e3, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
