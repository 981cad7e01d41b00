#!/usr/bin/env python3
"""Measure saving and loading of checkpoints against `dd` on the same disk.

    python tools/benchmark/checkpoint.py [--folder DISK] [--gib 1] [--output FILE]

A save ends when everything is on the disk (fsync of files and folders), and so does `dd conv=fsync`; each save writes
new files of this process's state. A load reads files whose pages were dropped from the page cache before, and so does
the reading `dd`, which moves blocks of 16 MiB. Figures are medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, replicated
from tools.benchmark.result import ROOT, write_result

BLOCK_BYTES = 16 * 2**20
NUM_TENSORS = 32


def seconds(action: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def build_state(num_bytes: int) -> list[ShardedTensor]:
    """Random fp32 tensors of equal size [n]: about `num_bytes` together."""
    numel = num_bytes // NUM_TENSORS // 4
    return [replicated(f"layer{index}.weight", torch.rand(numel)) for index in range(NUM_TENSORS)]


def drop_from_cache(folder: Path) -> None:
    """Make the kernel forget the pages of all files of a folder, so that the next read reaches the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_dd(*words: str) -> None:
    """Run dd."""
    subprocess.run(["dd", f"bs={BLOCK_BYTES}", *words], check=True, capture_output=True)


def measure(disk: Path, num_bytes: int, repeats: int) -> dict[str, Any]:
    """Time save, load and both directions of dd in turn; returns medians in GB/s and their ratios."""
    state = build_state(num_bytes)
    num_bytes = sum(tensor.data.numel() * 4 for tensor in state)
    num_blocks = num_bytes // BLOCK_BYTES
    raw: dict[str, list[float]] = {"save": [], "dd_write": [], "load": [], "dd_read": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=disk) as name:
            folder = Path(name)
            saved, plain = folder / "iter_0000001", folder / "plain"
            raw["save"].append(seconds(lambda saved=saved: dist_checkpointing.save(saved, state, {})))
            source = next(saved.glob("*.distcp"))
            # dd copies the file of the checkpoint: the same bytes, read from the page cache.
            words = (f"if={source}", f"of={plain}", f"count={num_blocks}", "conv=fsync")
            raw["dd_write"].append(seconds(lambda words=words: run_dd(*words)))
            drop_from_cache(folder)
            raw["load"].append(seconds(lambda saved=saved: dist_checkpointing.load(saved, state)))
            raw["dd_read"].append(seconds(lambda plain=plain: run_dd(f"if={plain}", "of=/dev/null")))
            shutil.rmtree(saved)
    sizes = {name: num_blocks * BLOCK_BYTES if name.startswith("dd") else num_bytes for name in raw}
    rates = {name: sizes[name] / statistics.median(times) / 1e9 for name, times in raw.items()}
    return {
        "bytes": num_bytes,
        "gb_per_s": rates,
        "ratio": {"save": rates["save"] / rates["dd_write"], "load": rates["load"] / rates["dd_read"]},
        "raw_s": raw,
        "disk": subprocess.run(["stat", "-f", "-c", "%T", str(disk)], capture_output=True, text=True).stdout.strip(),
    }


def report(results: dict[str, Any]) -> str:
    """Return the table that is printed."""
    rates, ratio = results["gb_per_s"], results["ratio"]
    lines = [f"{'':<8}{'GB/s':>8}{'dd GB/s':>10}{'ratio':>8}"]
    for name, other in (("save", "dd_write"), ("load", "dd_read")):
        lines.append(f"{name:<8}{rates[name]:>8.2f}{rates[other]:>10.2f}{ratio[name]:>8.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT, help="a folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks" / "checkpoint-cpu.json"
    )
    args = parser.parse_args(argv)
    results = measure(args.folder, int(args.gib * 2**30), args.repeats)
    print(report(results))
    write_result(args.output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
