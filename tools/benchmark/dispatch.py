"""Speed of dispatch with permute and combine with unpermute, at the shapes of the model slices.

    python tools/benchmark/dispatch.py                 one GPU: two ranks in one process, each kernel by itself
    python tools/benchmark/dispatch.py --sweep         one GPU: tilings of each kernel
    python tools/benchmark/dispatch.py --gpus 2        a process per GPU: ours, and NCCL all-to-all with permute

On one GPU nothing crosses a link: a kernel's figure is its bandwidth, bytes read and written, beside that of a plain
copy in the same run. On several GPUs a figure is the time of the whole operation. Everything is captured in a graph and
timed by replay, so the host does not count; variants alternate, medians are reported. `new` computes the routing,
`reused` runs along the saved one, as a backward pass does. Writes dispatch-<gpus>gpu.json into
docs/evidence/benchmarks or --folder.
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

from megatron.core.transformer.moe.dispatchers.hybridep.engine import EngineSetup
from megatron.core.transformer.moe.dispatchers.hybridep.metadata import Exchange
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem import SymmMemEngine
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_group import LocalSymmetricGroup
from megatron.core.transformer.moe.dispatchers.hybridep.symm_mem_launch import Launch, Tiling
from tools.benchmark.result import ROOT, write_result

CALLS_PER_GRAPH, WARM_UPS, REPEATS = 4, 2, 11
COPY_BYTES = 1 << 30
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
CANDIDATES = {
    "push": [Tiling(b, c, w, t) for b in (32, 64, 132) for c, w, t in ((2048, 8, 4), (1024, 8, 8), (2048, 16, 8))],
    "expand": [Tiling(b, c, w) for b in (528, 1056, 2112) for c, w in ((1024, 4), (2048, 4), (2048, 8), (8192, 8))],
    "reduce": [Tiling(b, c, w) for b in (264, 528, 1056) for c, w in ((512, 2), (1024, 4), (2048, 4), (2048, 8))],
    "add": [Tiling(b, c, w) for b in (528, 1056, 2112) for c, w in ((1024, 4), (2048, 4), (2048, 8), (8192, 8))],
}


def route(shape: Shape, routing: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 [T, k], ascending, and probabilities [T, k]; skewed: expert e has the weight 1 / sqrt(e + 1)."""
    generator = torch.Generator("cuda").manual_seed(1234 + rank)
    scores = torch.rand(shape.tokens, shape.experts, generator=generator, device="cuda")
    if routing == "skewed":
        scores = scores.log() * torch.arange(1, shape.experts + 1, device="cuda").sqrt()
    ids = scores.topk(shape.topk, dim=1).indices.sort(dim=1).values
    return ids.int(), torch.rand(ids.shape, generator=generator, device="cuda")


def time_in_turn(calls: dict[str, Callable[[], Any]], fence: Callable[[], None] = lambda: None) -> dict[str, list]:
    """Microseconds of each call, from replays of graphs with several calls in each, variants interleaved."""
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        fence()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS_PER_GRAPH):
                call()
    times: dict[str, list] = {name: [] for name in calls}
    for repeat in range(WARM_UPS + REPEATS):
        for name, graph in graphs.items():
            fence()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= WARM_UPS:
                times[name].append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return times


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
            "expand": lambda: engine.expand(exchange, self.hidden, None),
            "reduce": lambda: engine.reduce(exchange, self.rows, self.row_probs),
            "add": lambda: engine.add(exchange, self.out, None),
        }

    def row_moves(self) -> dict[str, int]:
        """Rows that each kernel must read and write; slots and probabilities are not counted."""
        local = self.engine.setup.num_local_experts
        here = [int((ids < local).any(dim=1).sum()) for ids in self.routes]
        there = int((self.routes[0] >= local).any(dim=1).sum())
        tokens, rows = len(self.hidden), len(self.rows)
        return {
            "push": tokens + there,
            "expand": sum(here) + rows,
            "reduce": rows + sum(here),
            "add": here[0] + there + tokens,
        }


def copy_bandwidth() -> float:
    """GB/s, read and written, of a copy beyond the caches, by the driver or by a kernel, whichever is faster."""
    source = torch.zeros(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    times = time_in_turn({"driver": lambda: target.copy_(source), "kernel": lambda: torch.neg(source, out=target)})
    return 2 * COPY_BYTES / min(map(statistics.median, times.values())) / 1000


def measure_kernels(shape: Shape, routing: str, num_sms: int | None) -> dict[str, Any]:
    """Bandwidth of every kernel, and of the two that prepare the routing their time."""
    pair = LocalPair(shape, routing, Launch.of(num_sms))
    calls = pair.calls()
    calls["prepare"] = lambda: pair.engine.prepare(Exchange(expert_ids=pair.exchange.expert_ids))
    row_bytes = pair.hidden.element_size() * shape.width
    moves, found = pair.row_moves(), {}
    for name, times in time_in_turn(calls).items():
        median = statistics.median(times)
        found[name] = {"us": median, "times_us": times}
        if name in moves:
            found[name]["gb_per_s"] = moves[name] * row_bytes / median / 1000
    return found


def sweep_kernels(shape: Shape) -> dict[str, Any]:
    """Bandwidth of every kernel under every tiling."""
    found: dict[str, Any] = {}
    for name, tilings in CANDIDATES.items():
        for tiling in tilings:
            pair = LocalPair(shape, ROUTINGS[0], dataclasses.replace(Launch(), **{name: tiling}))
            median = statistics.median(time_in_turn({name: pair.calls()[name]})[name])
            bandwidth = pair.row_moves()[name] * pair.hidden.element_size() * shape.width / median / 1000
            found[f"{name} {tiling.blocks} blocks, {tiling.columns} columns, {tiling.warps} warps, {tiling.tokens}"] = {
                "us": median,
                "gb_per_s": bandwidth,
            }
    return found


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
    times = time_in_turn(calls, dist.barrier)
    dropped = int(kept.dropped_rows.item()) if kept.dropped_rows is not None else 0
    found: dict[str, Any] = {name: {"us": statistics.median(t), "times_us": t} for name, t in times.items()}
    return found | {"dropped_rows": dropped}


def run_rank(rank: int, ranks: int, port: int, num_sms: int | None, folder: Path) -> None:
    """One process of the measurement between GPUs; rank 0 reports."""
    torch.cuda.set_device(rank)
    place = {"rank": rank, "world_size": ranks, "device_id": torch.device("cuda", rank)}
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", **place)
    results: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth()}
    for shape in SHAPES:
        for routing in ROUTINGS:
            found = measure_ranks(shape, routing, num_sms)
            results[f"{shape.name} {routing}"] = found
            if rank == 0:
                report(f"{shape.name} {routing}", found, None)
    if rank == 0:
        write_result(folder / f"dispatch-{ranks}gpu{suffix(num_sms)}.json", results)
    dist.destroy_process_group()


def report(title: str, found: dict[str, Any], copy: float | None) -> None:
    """Print the figures of one shape."""
    for name, figures in found.items():
        if not isinstance(figures, dict):
            print(f"{title:24s} {name}: {figures}", flush=True)
            continue
        bandwidth = figures.get("gb_per_s")
        share = f" {bandwidth:6.0f} GB/s = {bandwidth / copy:4.0%} of a copy" if bandwidth and copy else ""
        print(f"{title:24s} {figures['us']:8.1f} us{share}  {name}", flush=True)


def run_one_gpu(is_sweep: bool, num_sms: int | None, folder: Path) -> None:
    """Kernels by themselves."""
    copy = copy_bandwidth()
    print(f"copy: {copy:.0f} GB/s", flush=True)
    results: dict[str, Any] = {"copy_gb_per_s": copy}
    for shape in SHAPES:
        if is_sweep:
            found = results[shape.name] = sweep_kernels(shape)
            report(shape.name, dict(sorted(found.items(), key=lambda item: item[1]["us"])), copy)
            continue
        for routing in ROUTINGS:
            found = results[f"{shape.name} {routing}"] = measure_kernels(shape, routing, num_sms)
            report(f"{shape.name} {routing}", found, copy)
    write_result(folder / f"dispatch-{'sweep' if is_sweep else '1gpu'}{suffix(num_sms)}.json", results)


def suffix(num_sms: int | None) -> str:
    """Of the result's name."""
    return "" if num_sms is None else f"-{num_sms}sms"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="processes with a GPU each (default: %(default)s)")
    parser.add_argument("--sms", type=int, help="multiprocessors for our kernels (default: as many as help)")
    parser.add_argument("--sweep", action="store_true", help="time the tilings of each kernel, on one GPU")
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
