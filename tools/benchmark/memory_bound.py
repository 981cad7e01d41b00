"""Kernels that memory limits, each beside a copy: time, bytes that it has to move, share of the copy's bandwidth.

    python tools/benchmark/memory_bound.py                          the sizes of slice A
    python tools/benchmark/memory_bound.py --rows loss --sweep      also other tiles of these kernels

Bytes are those that any form must read and write once. Times are medians of replays of a CUDA graph. Written to
fused-<rows>.json in docs/evidence/benchmarks or --folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.configs.transformer import TransformerConfig
from megatron.core.fusions import fused_adam, fused_cross_entropy, fused_rms_norm
from megatron.core.fusions.fused_adam import AdamRule, AdamTensors, StepScalars, adam_step
from megatron.core.fusions.fused_cross_entropy import VocabularyPart, logit_gradient, scan_logits
from megatron.core.fusions.fused_gate import wide_linear
from megatron.core.fusions.fused_rms_norm import NormRule, add_rms_norm, norm_backward, norm_forward
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.moe.router import TopKRouter
from tools.benchmark.result import ROOT, write_result
from tools.benchmark.timing import time_replays

TOKENS, SAMPLES, VOCABULARY, EXPERTS, WIDTH = 16384, 4, 38016, 128, 2048
COPY_BYTES = 1 << 30
OTHER_TILES = ((2048, 4), (4096, 8), (8192, 8))
"""Columns and warps of the loss kernels that a sweep tries beside the chosen ones."""
NORM_CONSTANTS = {"MAX_PROGRAMS": (264, 396, 528, 660, 1056), "STAGES": (1, 2, 3, 4), "WARP_ELEMENTS": (256, 512)}
"""What the sweep tries for the kernel of the norm's gradient."""
CALLS_PER_GRAPH, REPEATS = 3, 7


@dataclass(frozen=True)
class Row:
    """One kernel at one size."""

    name: str
    call: Callable[[], Any]
    moved_bytes: int
    note: str = ""


def microseconds(call: Callable[[], Any]) -> list[float]:
    """Times of one call, from replays of a graph that holds several."""
    return time_replays({"": call}, CALLS_PER_GRAPH, REPEATS)[""]


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

    kernels = (("forward", scan, size, "SCAN"), ("backward", gradient, 2 * size, "GRADIENT"))
    for name, call, moved, constant in kernels:
        chosen = tuple(getattr(fused_cross_entropy, f"{constant}_{kind}") for kind in ("TILE", "WARPS"))
        for tile, warps in dict.fromkeys([chosen, *(OTHER_TILES if is_swept else ())]):
            setattr(fused_cross_entropy, f"{constant}_TILE", tile)
            setattr(fused_cross_entropy, f"{constant}_WARPS", warps)
            yield Row(f"cross entropy {name}", call, moved, f"{tile} columns, {warps} warps")
        setattr(fused_cross_entropy, f"{constant}_TILE", chosen[0])
        setattr(fused_cross_entropy, f"{constant}_WARPS", chosen[1])
    leaf = logits.view(4096, 4, VOCABULARY).requires_grad_()
    for fuses in (True, False):

        def both(fuses: bool = fuses) -> None:
            losses = vocab_parallel_cross_entropy(leaf, targets.view(4096, 4), fuses=fuses)
            torch.autograd.grad(losses, leaf, grad.view(4096, 4))

        yield Row("cross entropy, both", both, 3 * size, "kernels" if fuses else "plain form")


def measure_copy() -> float:
    """Bytes per microsecond that the faster of two copies reads and writes: torch's, or a kernel that negates."""
    source = torch.zeros(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * COPY_BYTES / min(statistics.median(microseconds(copy)) for copy in copies)


def router_rows(is_swept: bool) -> Iterator[Row]:
    """The router of one layer of slice A, with its balancing loss, by kernels and in the plain form; and its gate."""
    del is_swept
    logits = torch.randn(TOKENS // SAMPLES, SAMPLES, EXPERTS, device="cuda").requires_grad_()
    grad = torch.randn(TOKENS, EXPERTS, device="cuda")
    for is_fused in (True, False):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=16,
            num_moe_experts=EXPERTS,
            moe_router_topk=8,
            moe_router_dtype="fp32",
            moe_aux_loss_coeff=0.001,
            moe_router_fusion=is_fused,
            bf16=True,
        )
        router = TopKRouter(config, ProcessGroupCollection(), 1).cuda()

        def forward(router: TopKRouter = router) -> tuple[torch.Tensor, torch.Tensor]:
            return router.routing(logits)

        def both(router: TopKRouter = router) -> None:
            torch.autograd.grad(router.routing(logits)[0], logits, grad)

        note = "kernels" if is_fused else "plain form"
        moved = logits.nbytes * 2 + logits.numel()  # logits, probabilities, map
        yield Row("router forward", forward, moved, note)
        yield Row("router, both", both, 2 * moved + logits.nbytes, note)
    hidden = torch.randn(TOKENS // SAMPLES, SAMPLES, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(EXPERTS, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gates = {
        "fp32": lambda: hidden.float() @ weight.float().t(),
        "bf16 to fp32": lambda: wide_linear(hidden, weight),
    }
    for note, gate_product in gates.items():

        def gate(logits_of: Callable[[], torch.Tensor] = gate_product) -> None:
            torch.autograd.grad(logits_of(), (hidden, weight), grad.view(logits.shape))

        yield Row("gate, both", gate, 3 * hidden.nbytes + 3 * logits.nbytes, note)


def norm_rows(is_swept: bool) -> Iterator[Row]:
    """The norm of one layer of slice A with the residual stream around it, by kernels and in the plain form."""
    x, residual, grad, grad_total = torch.randn(4, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16).unbind()
    weight = torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)
    rule = NormRule(1e-6)
    _, total, scales = norm_forward(x, residual, weight, rule)
    yield Row("norm forward", lambda: norm_forward(x, residual, weight, rule), 4 * x.nbytes, "kernel")

    def backward() -> None:
        norm_backward(grad, grad_total, total, scales, weight, rule)

    chosen = tuple(getattr(fused_rms_norm, name) for name in NORM_CONSTANTS)
    for values in dict.fromkeys([chosen, *(product(*NORM_CONSTANTS.values()) if is_swept else ())]):
        vars(fused_rms_norm).update(zip(NORM_CONSTANTS, values, strict=True))
        yield Row("norm backward", backward, 4 * x.nbytes, "{} programs, {} stages, {} each".format(*values))
    vars(fused_rms_norm).update(zip(NORM_CONSTANTS, chosen, strict=True))
    leaves = [leaf.clone().requires_grad_() for leaf in (x, residual, weight)]

    def plain_forward() -> tuple[torch.Tensor, torch.Tensor]:
        both = leaves[0] + leaves[1]
        return F.rms_norm(both, (WIDTH,), leaves[2], 1e-6), both

    for note, call in {"kernels": lambda: add_rms_norm(*leaves, rule), "plain form": plain_forward}.items():

        def both(call: Callable[[], tuple[torch.Tensor, torch.Tensor]] = call) -> None:
            torch.autograd.grad(call(), leaves, (grad, grad_total))

        yield Row("norm, both", both, 8 * x.nbytes, note)


def adam_rows(is_swept: bool) -> Iterator[Row]:
    """A step of Adam for the experts' first weights of a layer of slice A; and torch's with its copy to bf16."""
    shape = (EXPERTS, 2 * 768, WIDTH)
    param, grad, exp_avg, exp_avg_sq = (torch.randn(shape, device="cuda") for _ in range(4))
    exp_avg_sq.square_()
    one, rounded = torch.ones((), device="cuda"), torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    tensors = AdamTensors(param, grad, exp_avg, exp_avg_sq, one.clone(), rounded)
    scalars, rule = StepScalars(one * 1e-4, one, one * 0.0), AdamRule((0.9, 0.95), 1e-8, 0.1, True)
    moved = 7 * param.nbytes + rounded.nbytes
    chosen = fused_adam.BLOCK, fused_adam.WARPS
    for values in dict.fromkeys([chosen, *(((512, 4), (1024, 4), (2048, 8), (2048, 16)) if is_swept else ())]):
        fused_adam.BLOCK, fused_adam.WARPS = values
        yield Row("adam", lambda: adam_step(tensors, scalars, rule), moved, "{} elements, {} warps".format(*values))
    fused_adam.BLOCK, fused_adam.WARPS = chosen

    def plain() -> None:
        torch._fused_adamw_(
            [param],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [tensors.step],
            lr=scalars.lr,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=scalars.grad_scale,
            found_inf=scalars.found_inf,
        )
        rounded.copy_(param)

    yield Row("adam", plain, moved, "torch and copy")


GROUPS = {"loss": loss_rows, "router": router_rows, "norm": norm_rows, "adam": adam_rows}


def main(argv: list[str] | None = None) -> int:
    """Time the rows, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--sweep", action="store_true", help="also time other tiles of the kernels")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks")
    args = parser.parse_args(argv)
    copy_rate = measure_copy()
    print(f"copy of {COPY_BYTES >> 20} MiB: {copy_rate / 1e3:.0f} GB/s")
    for group in args.rows:
        rows = []
        for row in GROUPS[group](args.sweep):
            raw_us = microseconds(row.call)
            time_us = statistics.median(raw_us)
            share = row.moved_bytes / time_us / copy_rate
            print(f"{row.name:<28}{row.note:<28}{time_us:>9.1f} us{share:>7.2f} of a copy", flush=True)
            figures = {"us": time_us, "raw_us": raw_us, "bytes": row.moved_bytes, "share_of_copy": share}
            rows.append({"name": row.name, "note": row.note, **figures})
        write_result(args.folder / f"fused-{group}.json", {"copy_gb_s": copy_rate / 1e3, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
