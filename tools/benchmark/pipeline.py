#!/usr/bin/env python3
"""Memory of a pipeline against its formula, and the cost of the executor.

    python tools/benchmark/pipeline.py [--out FILE]                 the executor alone: microseconds per action
    torchrun --nproc-per-node 2 tools/benchmark/pipeline.py [--vpp 2]   a GPT of a billion parameters in as many stages
    torchrun --nproc-per-node 2 tools/benchmark/pipeline.py --size tiny     a small one, also on CPUs

With a model, rank r holds at most n microbatches (or chunks of one), n the peak that the schedule declares. From a step
with as few microbatches as possible come A, what one forward leaves behind, and T, what a step needs beyond that:

    predicted peak = model + n * A + T
"""

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core import env, parallel_state  # noqa: E402
from megatron.core.configs.transformer import TransformerConfig  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.pipeline_parallel.actions import Action, PlanShape  # noqa: E402
from megatron.core.pipeline_parallel.executor import PlainWorker, execute  # noqa: E402
from megatron.core.pipeline_parallel.plans import PLANS, build_plan  # noqa: E402
from megatron.core.pipeline_parallel.schedules import message_format, plan_name  # noqa: E402
from megatron.core.pipeline_parallel.step import StepContext  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.utils.collectives import all_gather_object, barrier  # noqa: E402
from megatron.core.utils.device import resolve_device  # noqa: E402
from megatron.training.model_setup import build_chunks  # noqa: E402
from tools.benchmark.result import write_result  # noqa: E402

SIZES = {
    "1b": {"num_layers": 20, "hidden_size": 2048, "ffn_hidden_size": 5632, "num_attention_heads": 16},
    "tiny": {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
}
LENGTHS = {"1b": (2048, 32000), "tiny": (16, 64)}
"""Sequence and vocabulary."""
REPEATS = 5


class IdleWorker:
    """Computes nothing, so that what remains is the executor and its messages."""

    def __init__(self, context: StepContext) -> None:
        self.tensor = torch.empty(0) if context.message_format is None else empty_message(context)

    def streams(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        return self.tensor

    def backward(self, action: Action, grad: torch.Tensor | None) -> torch.Tensor | None:
        return self.tensor

    def overlap(self, action: Action, received: Any, grad: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.tensor, self.tensor

    def finish(self) -> None:
        pass


class WeighingWorker(PlainWorker):
    """Notes the bytes that each forward leaves behind."""

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.left_behind: list[int] = []

    def forward(self, action: Action, received: torch.Tensor | None) -> torch.Tensor:
        before = allocated()
        output = super().forward(action, received)
        self.left_behind.append(allocated() - before)
        return output


def allocated() -> int:
    """Bytes in use on the device; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def empty_message(context: StepContext) -> torch.Tensor:
    """A message of the size of the step."""
    form = context.message_format
    assert form is not None, "there is one stage"
    return torch.zeros(form.shape, dtype=form.dtype, device=form.device)


def make_config(size: str, num_stages: int, vpp: int | None, device: str) -> TransformerConfig:
    """A dense GPT of that size, in bf16 on a GPU."""
    return TransformerConfig(
        **SIZES[size],  # type: ignore[arg-type]
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=device == "cuda",
        device=device,  # type: ignore[arg-type]
        init_device="device",
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=vpp,
    )


class Bench:
    """A model in stages and its steps."""

    def __init__(self, size: str, vpp: int | None, device: str) -> None:
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.seq_length, vocab_size = LENGTHS[size]
        self.config = make_config(size, dist.get_world_size(), vpp, device)
        self.device = resolve_device(device)

        def provide(**ends: Any) -> torch.nn.Module:
            spec = get_gpt_decoder_block_spec(self.config)
            arguments = {"position_embedding_type": "rope", **ends}
            return GPTModel(self.config, spec, vocab_size, self.seq_length, **arguments)

        chunks = build_chunks(provide, vpp or 1, self.groups)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(self.config, ddp, chunk) for chunk in chunks]
        self.tokens = torch.randint(vocab_size, (1, self.seq_length), device=self.device)
        self.positions = torch.arange(self.seq_length, device=self.device)[None]

    def context(self, num_microbatches: int) -> StepContext:
        """What the executor needs for a step."""
        shape = PlanShape(
            num_microbatches, False, len(self.chunks), dist.get_world_size(), dist.get_rank(self.groups.pp)
        )
        return StepContext(
            forward_step_func=self.forward_step,
            data_iterators=[None] * len(self.chunks),
            chunks=self.chunks,
            config=self.config,
            num_microbatches=num_microbatches,
            pg_collection=self.groups,
            shape=shape,
            message_format=message_format(self.config, self.groups, self.seq_length, 1),
        )

    def forward_step(self, iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """The model on the same tokens each time."""
        output = model(self.tokens, self.positions, None, labels=self.tokens)
        return output, lambda losses: (losses.mean(), {})

    def step(self, num_microbatches: int, worker: type) -> tuple[Any, float, int]:
        """Run a step; returns the worker, seconds and peak bytes."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        context = self.context(num_microbatches)
        plan = build_plan(plan_name(context.shape), context.shape)
        doer = worker(context)
        self.synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        execute(plan, context, doer)
        host_seconds = time.perf_counter() - start
        self.synchronize()
        return doer, host_seconds / len(plan), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def synchronize(self) -> None:
        """Wait for the device and the other ranks."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        barrier(self.groups.pp)


def executor_alone(num_microbatches: int = 2000) -> dict[str, Any]:
    """Microseconds per action, without model and messages: the least and all."""
    context = StepContext(
        forward_step_func=lambda iterator, model: (torch.empty(0), None),
        data_iterators=[None],
        chunks=[torch.nn.Identity()],
        config=TransformerConfig(**SIZES["tiny"]),  # type: ignore[arg-type]
        num_microbatches=num_microbatches,
        pg_collection=ProcessGroupCollection(),
    )
    shape = PlanShape(num_microbatches)
    plan = build_plan(plan_name(shape), shape)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        execute(plan, context, IdleWorker(context))
        times.append((time.perf_counter() - start) / len(plan) * 1e6)
    return {"executor_us_per_action": min(times), "times_us": times, "actions": len(plan)}


def with_model(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of all ranks."""
    device = "cuda" if torch.cuda.is_available() and args.size != "tiny" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(env.local_rank())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(1, dist.get_world_size(), args.vpp)
    bench = Bench(args.size, args.vpp, device)
    fewest = dist.get_world_size() if args.vpp else 1
    bench.step(fewest, PlainWorker)  # communicators, work spaces, kernels
    model = allocated()
    weigher, _, least_peak = bench.step(fewest, WeighingWorker)
    _, _, peak = bench.step(args.num_microbatches, PlainWorker)
    overheads = [bench.step(args.num_microbatches, IdleWorker)[1] * 1e6 for _ in range(REPEATS)]
    shape = bench.context(args.num_microbatches).shape
    schedule = PLANS[plan_name(shape)]
    in_flight, at_least = (
        schedule.peak_in_flight(replace(shape, num_microbatches=n)) for n in (args.num_microbatches, fewest)
    )
    per_forward = sum(weigher.left_behind) / len(weigher.left_behind)
    predicted = least_peak + (in_flight - at_least) * per_forward
    figures = {
        "rank": dist.get_rank(),
        "parameters": sum(p.numel() for chunk in bench.chunks for p in chunk.parameters()),
        "model_bytes": model,
        "in_flight": in_flight,
        "bytes_per_forward": per_forward,
        "predicted_peak_bytes": predicted,
        "peak_bytes": peak,
        "deviation": peak / predicted - 1 if predicted else 0.0,
        "overhead_us_per_action": min(overheads),
    }
    every_rank = all_gather_object(figures, bench.groups.pp)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return every_rank


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b", help="model (default: %(default)s)")
    parser.add_argument("--vpp", type=int, help="chunks on each rank")
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    if env.world_size() is None:
        figures: Any = executor_alone()
    else:
        figures = with_model(args)
    if env.rank() == 0:
        for line in figures if isinstance(figures, list) else [figures]:
            sys.stdout.write(f"{line}\n")
        if args.out is not None:
            model = {} if env.world_size() is None else {"size": args.size, "vpp": args.vpp}
            write_result(args.out, {"figures": figures, **model})


if __name__ == "__main__":
    main()
