"""Speed of dispatch with permute and combine with unpermute, at the shapes of the model slices.

    python tools/benchmark/dispatch.py                 one GPU: two ranks in one process, each kernel by itself
    python tools/benchmark/dispatch.py --sweep         one GPU: tilings of each kernel, or of those named
    python tools/benchmark/dispatch.py --gpus 2        a process per GPU: ours and NCCL with permute (never run)

On one GPU nothing crosses a link: a kernel's figure is its bandwidth, bytes of rows read and written, beside that of a
plain copy of as many bytes in the same run. On several GPUs a figure is the time of the whole operation. Everything is
captured in a graph and timed by replay, so the host does not count; variants alternate, medians are reported. `new`
computes the routing, `reused` runs along the saved one, as a backward pass does. Writes dispatch-<gpus>gpu.json into
docs/evidence/benchmarks or --folder.

The copy is the faster of two, the driver's and that of a kernel. It moves half of the bytes from one buffer to another,
so that launch, start and end weigh as much, and the caches keep as much from call to call.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.fusions.fused_permute import SPREAD, SUM, Tile, kernel_spread, kernel_sum
from megatron.core.fusions.fused_row_layout import row_layout
from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import PACKED_BLOCK, SymmMemEngine
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import LocalSymmetricGroup
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_launch import Launch, Tiling
from tools.benchmark.result import ROOT, write_result
from tools.benchmark.timing import nothing, time_replays

CALLS_PER_GRAPH, REPEATS = 4, 11
COPY_BYTES = (1 << 26, 1 << 28, 1 << 30)
BUDGET_FACTOR = 1.3
DISPATCH, COMBINE = "dispatch", "combine"


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens on each rank [T, h], E experts in all, k of them per token."""

    tokens: int
    width: int
    experts: int
    topk: int

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.tokens}x{self.width} {self.experts}/{self.topk}"


SHAPES = (Shape(4096, 4096, 8, 2), Shape(4096, 7168, 256, 8), Shape(16384, 2048, 128, 8))
ROUTINGS = ("uniform", "skewed")
ENGINE_CANDIDATES = {
    "push": [Tiling(b, 2048, 16, 8) for b in (64, 132)],
    "push fp8": [Tiling(b, c, w, t) for b in (64, 132) for c, w, t in ((2048, 16, 8), (2048, 16, 4), (1024, 16, 8))],
    "expand": [Tiling(b, c, 8) for b in (1056, 2112, 8448, 32768) for c in (2048, 4096)],
    "expand fp8": [Tiling(b, c, w) for b in (2112, 8448) for c, w in ((2048, 4), (2048, 8), (4096, 8), (8192, 8))],
    "reduce": [Tiling(b, 2048, w) for b in (396, 528, 792, 1056, 1584) for w in (4, 8)]
    + [Tiling(b, c, w) for b, c, w in ((264, 4096, 8), (528, 4096, 8), (1056, 1024, 4), (2112, 1024, 4))],
    "add": [Tiling(b, c, 8) for b in (1056, 2112, 8448) for c in (1024, 2048)],
}
LAYOUT_CANDIDATES = {
    "permute": [Tile(c, w) for c, w in ((1024, 4), (2048, 8), (4096, 4), (4096, 16), (8192, 8))],
    "unpermute": [Tile(c, w) for c, w in ((512, 2), (1024, 4), (2048, 8), (2048, 4))],
}

SWEPT = (*ENGINE_CANDIDATES, *LAYOUT_CANDIDATES)


def route(shape: Shape, routing: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 [T, k], ascending, and probabilities [T, k]; skewed: expert e has the weight 1 / sqrt(e + 1)."""
    generator = torch.Generator("cuda").manual_seed(1234 + rank)
    scores = torch.rand(shape.tokens, shape.experts, generator=generator, device="cuda")
    if routing == "skewed":
        scores = scores.log() * torch.arange(1, shape.experts + 1, device="cuda").sqrt()
    ids = scores.topk(shape.topk, dim=1).indices.sort(dim=1).values
    return ids.int(), torch.rand(ids.shape, generator=generator, device="cuda")


def time_calls(calls: dict[str, Callable[[], Any]], fence: Callable[[], None] = nothing) -> dict[str, list[float]]:
    """Microseconds of each call, from replays of graphs with several calls in each, variants interleaved."""
    return time_replays(calls, CALLS_PER_GRAPH, REPEATS, fence)


class LocalPair:
    """Rank 0 of two in one process after a forward pass, ready to launch any of its kernels again."""

    def __init__(self, shape: Shape, routing: str, launch: Launch) -> None:
        group = LocalSymmetricGroup(2, "cuda")
        local = shape.experts // 2
        engines = [SymmMemEngine(EngineSetup(rank, local, shape.width), launch=launch) for rank in group.ranks]
        routes = [route(shape, routing, rank) for rank in range(2)]
        exchanges = [Exchange(expert_ids=ids) for ids, _ in routes]
        hidden = [torch.randn(shape.tokens, shape.width, device="cuda").bfloat16() for _ in range(2)]
        for engine, exchange in zip(engines, exchanges, strict=True):
            engine.prepare(exchange)
        rounds = zip(engines, exchanges, hidden, routes, strict=True)
        sent = group.run([e.dispatch_phases(x, h, probs) for e, x, h, (_, probs) in rounds])
        group.run([e.combine_phases(x, rows, p) for e, x, (rows, p) in zip(engines, exchanges, sent, strict=True)])
        torch.cuda.synchronize()
        self.engine, self.exchange, self.hidden, self.probs = engines[0], exchanges[0], hidden[0], routes[0][1]
        self.rows, self.row_probs = sent[0]
        self.out = torch.empty_like(self.hidden)
        self.routes = [ids for ids, _ in routes]

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Each kernel that moves rows."""
        engine, exchange = self.engine, self.exchange
        return {
            "push": lambda: engine.push(exchange, self.hidden, self.probs),
            "push fp8": lambda: engine.push(exchange, self.hidden, self.probs, is_packed=True),
            "expand": lambda: engine.expand(exchange, self.hidden, None),
            "expand fp8": lambda: engine.expand(exchange, self.hidden, None, is_packed=True),
            "reduce": lambda: engine.reduce(exchange, self.rows, self.row_probs),
            "add": lambda: engine.add(exchange, self.out, None),
        }

    def moved_bytes(self) -> dict[str, int]:
        """Bytes of rows that each kernel must read and write; slots and probabilities are not counted."""
        local, width = self.engine.setup.num_local_experts, self.engine.setup.hidden_size
        here = [int((ids < local).any(dim=1).sum()) for ids in self.routes]
        there = int((self.routes[0] >= local).any(dim=1).sum())
        tokens, rows = len(self.hidden), len(self.rows)
        row_bytes = self.hidden.element_size() * width
        packed_bytes = width + 4 * -(-width // PACKED_BLOCK)
        return {
            "push": (tokens + there) * row_bytes,
            "push fp8": tokens * row_bytes + there * packed_bytes,
            "expand": (sum(here) + rows) * row_bytes,
            "expand fp8": (here[0] + rows) * row_bytes + here[1] * packed_bytes,
            "reduce": (rows + sum(here)) * row_bytes,
            "add": (here[0] + there + tokens) * row_bytes,
        }

    def sweep(self, name: str, tiling: Tiling) -> Callable[[], Any]:
        """One of the kernels under another tiling."""
        launch, call = dataclasses.replace(Launch(), **{name.split()[0]: tiling}), self.calls()[name]

        def launched() -> None:
            self.engine._launch = launch
            call()

        return launched


class LocalRows:
    """The kernels of a row layout on one rank, which dispatchers without symmetric memory use."""

    def __init__(self, shape: Shape, routing: str) -> None:
        ids, _ = route(shape, routing, 0)
        self.layout = row_layout(ids, shape.experts, shape.tokens * shape.topk)
        self.tokens = torch.randn(shape.tokens, shape.width, device="cuda").bfloat16()
        self.rows, _ = kernel_spread(self.tokens, None, self.layout)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Each kernel that moves rows."""
        return {"permute": self.sweep("permute", SPREAD), "unpermute": self.sweep("unpermute", SUM)}

    def moved_bytes(self) -> dict[str, int]:
        """Bytes of rows that each kernel must read and write."""
        return dict.fromkeys(LAYOUT_CANDIDATES, self.tokens.nbytes + self.rows.nbytes)

    def sweep(self, name: str, tile: Tile) -> Callable[[], Any]:
        """One of the kernels under another tile."""
        if name == "permute":
            return lambda: kernel_spread(self.tokens, None, self.layout, tile)
        return lambda: kernel_sum(self.rows, None, self.layout.slots, self.tokens.dtype, tile)


class Copies:
    """Copies of as many bytes as asked for."""

    def __init__(self) -> None:
        self.source, self.target = (torch.zeros(max(COPY_BYTES), dtype=torch.uint8, device="cuda") for _ in range(2))

    def calls(self, num_bytes: int) -> dict[str, Callable[[], Any]]:
        """The driver's copy and that of a kernel, of half of the bytes read and written in all."""
        half = min(num_bytes // 2, max(COPY_BYTES)) // 16 * 16
        source, target = self.source[:half], self.target[:half]
        words, out = source.view(torch.int32), target.view(torch.int32)
        return {
            f"driver's copy of {num_bytes}": lambda: target.copy_(source),
            f"kernel's copy of {num_bytes}": lambda: torch.bitwise_not(words, out=out),
        }


def copy_bandwidths(copies: Copies) -> dict[str, float]:
    """GB/s, read and written, of copies of some sizes."""
    found = {}
    for size in COPY_BYTES:
        times = time_calls(copies.calls(2 * size))
        found[f"{size >> 20} MiB"] = 2 * size / min(map(statistics.median, times.values())) / 1000
    return found


def judge(times: dict[str, list], moved: dict[str, int]) -> dict[str, Any]:
    """Time and bandwidth of each kernel, and its share of the bandwidth of a copy of as many bytes."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    found = {}
    for name, num_bytes in moved.items():
        copy_us = min(us for other, us in medians.items() if other.endswith(f"copy of {num_bytes}"))
        found[name] = {
            "us": medians[name],
            "gb_per_s": num_bytes / medians[name] / 1000,
            "copy_us": copy_us,
            "share_of_copy": copy_us / medians[name],
            "times_us": times[name],
        }
    return found


def measure_kernels(shape: Shape, routing: str, num_sms: int | None, copies: Copies) -> dict[str, Any]:
    """Bandwidth of every kernel, and of those that prepare the routing their time."""
    pair, rows = LocalPair(shape, routing, Launch.of(num_sms, shape.width)), LocalRows(shape, routing)
    moved = pair.moved_bytes() | rows.moved_bytes()
    calls = pair.calls() | rows.calls()
    calls["prepare"] = lambda: pair.engine.prepare(Exchange(expert_ids=pair.exchange.expert_ids))
    for num_bytes in moved.values():
        calls |= copies.calls(num_bytes)
    times = time_calls(calls)
    return judge(times, moved) | {"prepare": {"us": statistics.median(times["prepare"]), "times_us": times["prepare"]}}


def sweep_kernels(shape: Shape, copies: Copies, kernels: list[str]) -> dict[str, Any]:
    """Bandwidth of kernels under every tiling, without the raw times."""
    found: dict[str, Any] = {}
    pair, rows = LocalPair(shape, ROUTINGS[0], Launch()), LocalRows(shape, ROUTINGS[0])
    for source, candidates in ((pair, ENGINE_CANDIDATES), (rows, LAYOUT_CANDIDATES)):
        for name, options in candidates.items():
            if name not in kernels:
                continue
            num_bytes = source.moved_bytes()[name]
            calls = {f"{name} {option}": source.sweep(name, option) for option in options}
            found |= judge(time_calls(calls | copies.calls(num_bytes)), dict.fromkeys(calls, num_bytes))
    return {name: {key: figures[key] for key in figures if key != "times_us"} for name, figures in found.items()}


# ------------------------------------------------------------------------------------------------------ several GPUs


class NcclPath:
    """Permute, all_to_all_single, regroup by expert; and back. Counts are known to the host, as after a first pass."""

    def __init__(self, ids: torch.Tensor, probs: torch.Tensor, local: int) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        expert, slot = ids.flatten().long().sort(stable=True)
        self.tokens = slot // ids.shape[1]
        counts = torch.bincount(expert, minlength=ranks * local)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        self.send = counts.view(ranks, local).sum(dim=1).tolist()
        self.recv = received.view(ranks, local).sum(dim=1).tolist()
        experts_received = torch.arange(local, device=ids.device).repeat(ranks).repeat_interleave(received)
        self.regroup = experts_received.argsort(stable=True)
        self.back = self.regroup.argsort()
        self.slots = slot.argsort().view(ids.shape)
        self.sorted_probs = probs.flatten()[slot]
        assert rank < ranks, "rank outside the group"

    def dispatch(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, h] -> rows [P, h] by expert, their probabilities."""
        rows, probs = self._exchange(hidden[self.tokens]), self._exchange(self.sorted_probs)
        return rows[self.regroup], probs[self.regroup]

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(sum(self.recv), *rows.shape[1:])
        dist.all_to_all_single(out, rows, self.recv, self.send)
        return out

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [P, h] -> [T, h], summed in fp32."""
        arrived = rows[self.back]
        out = rows.new_empty(sum(self.send), rows.shape[1])
        dist.all_to_all_single(out, arrived, self.send, self.recv)
        total = out[self.slots[:, 0]].float()
        for slot in range(1, self.slots.shape[1]):
            total += out[self.slots[:, slot]]
        return total.to(rows.dtype)


def measure_ranks(shape: Shape, routing: str, num_sms: int | None) -> dict[str, Any]:
    """Times of whole operations on this rank: ours with new and reused routing, and NCCL's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = shape.experts // ranks
    engine = SymmMemEngine(EngineSetup(dist.group.WORLD, local, shape.width, num_sms=num_sms))
    ids, probs = route(shape, routing, rank)
    hidden = torch.randn(shape.tokens, shape.width, device="cuda").bfloat16()
    worst = shape.tokens * ranks * min(shape.topk, local)
    budget = worst if routing == "skewed" else min(worst, int(shape.tokens * shape.topk * BUDGET_FACTOR))

    def exchange() -> Exchange:
        made = Exchange(expert_ids=ids, max_tokens=shape.tokens, row_budget=budget)
        engine.prepare(made)
        return made

    kept = exchange()
    rows, row_probs = engine.dispatch(kept, hidden, probs)
    nccl = NcclPath(ids, probs, local)
    nccl_rows, _ = nccl.dispatch(hidden)
    calls = {
        f"ours {DISPATCH} new": lambda: engine.dispatch(exchange(), hidden, probs),
        f"ours {DISPATCH} reused": lambda: engine.dispatch(kept, hidden, None),
        f"ours {COMBINE}": lambda: engine.combine(kept, rows, None),
        f"ours {COMBINE} with probs": lambda: engine.combine(kept, rows, row_probs),
        f"nccl {DISPATCH}": lambda: nccl.dispatch(hidden),
        f"nccl {COMBINE}": lambda: nccl.combine(nccl_rows),
    }
    times = time_calls(calls, dist.barrier)
    dropped = int(kept.dropped_rows.item()) if kept.dropped_rows is not None else 0
    found: dict[str, Any] = {name: {"us": statistics.median(t), "times_us": t} for name, t in times.items()}
    return found | {"dropped_rows": dropped}


def run_rank(rank: int, ranks: int, port: int, num_sms: int | None, folder: Path) -> None:
    """One process of the measurement between GPUs; rank 0 reports."""
    torch.cuda.set_device(rank)
    place = {"rank": rank, "world_size": ranks, "device_id": torch.device("cuda", rank)}
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", **place)
    results: dict[str, Any] = {"copy_gb_per_s": copy_bandwidths(Copies())}
    for shape in SHAPES:
        for routing in ROUTINGS:
            found = measure_ranks(shape, routing, num_sms)
            results[f"{shape.name} {routing}"] = found
            if rank == 0:
                report(f"{shape.name} {routing}", found)
    if rank == 0:
        write_result(folder / f"dispatch-{ranks}gpu{suffix(num_sms)}.json", results)
    dist.destroy_process_group()


def report(title: str, found: dict[str, Any]) -> None:
    """Print the figures of one shape."""
    for name, figures in found.items():
        if not isinstance(figures, dict):
            print(f"{title:24s} {name}: {figures}", flush=True)
            continue
        share = ""
        if "share_of_copy" in figures:
            share = f" {figures['gb_per_s']:6.0f} GB/s = {figures['share_of_copy']:4.0%} of a copy"
        print(f"{title:24s} {figures['us']:8.1f} us{share}  {name}", flush=True)


def run_one_gpu(swept: list[str] | None, num_sms: int | None, folder: Path) -> None:
    """Kernels by themselves; those `swept` under all tilings, if any are."""
    copies = Copies()
    results: dict[str, Any] = {"copy_gb_per_s": copy_bandwidths(copies)}
    print(f"copies, GB/s: {results['copy_gb_per_s']}", flush=True)
    path = folder / f"dispatch-{'1gpu' if swept is None else 'sweep'}{suffix(num_sms)}.json"
    for shape in SHAPES:
        if swept is not None:
            found = results[shape.name] = sweep_kernels(shape, copies, swept or list(SWEPT))
            report(shape.name, dict(sorted(found.items(), key=lambda item: item[1]["us"])))
        else:
            for routing in ROUTINGS:
                found = results[f"{shape.name} {routing}"] = measure_kernels(shape, routing, num_sms, copies)
                report(f"{shape.name} {routing}", found)
        write_result(path, results)


def suffix(num_sms: int | None) -> str:
    """Of the result's name."""
    return "" if num_sms is None else f"-{num_sms}sms"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="processes with a GPU each (default: %(default)s)")
    parser.add_argument("--sms", type=int, help="multiprocessors for our kernels (default: as many as help)")
    parser.add_argument(
        "--sweep", nargs="*", choices=SWEPT, metavar="KERNEL", help="tilings of all or these, on one GPU"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks", help="of the result")
    args = parser.parse_args(argv)
    if torch.cuda.device_count() < args.gpus:
        parser.error(f"--gpus {args.gpus}: {torch.cuda.device_count()} are here")
    if args.gpus == 1:
        run_one_gpu(args.sweep, args.sms, args.folder)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (args.gpus, port, args.sms, args.folder), nprocs=args.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
