#!/usr/bin/env python3
"""Run a training configuration for two steps on the CPU under the stream checker: `check_streams.py FLAGS...`.

FLAGS are those of pretrain_gpt.py; one gloo process is started for each rank. Exit code 0 means no finding, 1 findings,
2 a configuration that is refused. What decides the order of work stays as given: layers, parallel sizes, dispatcher,
overlap, recompute. Widths, lengths, experts and batches are cut down unless --full-size is given, and data are made up.
--world-size N sets the number of ranks, else WORLD_SIZE, else the smallest number that the parallel sizes allow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core import env
from megatron.core.configs.flag_spec import flag_specs
from megatron.core.errors import USER_ERRORS, ConfigError, exit_code
from megatron.training import yaml_config
from megatron.training.argument_factory import TOPICS, Parser, build_parser, read_command_line
from megatron.training.arguments import fill_defaults
from megatron.training.check_config import smallest_world

DEADLINE_S = 600.0
FORCED = (
    "--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 1 "
    "--num-workers 0 --eval-iters 0 --log-interval 1 --micro-batch-size 1 --check-streams"
)
LEFT_OUT = {
    "Training loop",
    "Schedules of learning rate and weight decay",
    "Data",
    "Tokenizer",
    "Checkpoints",
    "Logging",
    "Profiling",
}
"""Topics whose flags say how long a run is, what it reads and what it writes, not how a step works."""


def without(argv: Sequence[str], dests: set[str], parser: Parser) -> list[str]:
    """The command line without the flags of these destinations and their words."""
    kept: list[str] = []
    is_dropped = False
    for word in argv:
        if word.startswith("--"):
            spec = parser.specs.get(word.partition("=")[0])
            is_dropped = spec is not None and spec.dest in dests
        if not is_dropped:
            kept.append(word)
    return kept


def small_sizes(args: argparse.Namespace, world_size: int) -> dict[str, int]:
    """Sizes that keep every divisibility of the given ones: by heads, tensor, context and expert parallelism."""
    tp, cp, pp, ep = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
    )
    seq = min(args.seq_length or 8 * tp * cp, 8 * tp * cp)
    heads = args.num_attention_heads or 4 * tp * cp
    micro_batches = 2 * pp if pp > 1 else 3
    sizes = {
        "num_attention_heads": heads,
        "hidden_size": 8 * heads,
        "ffn_hidden_size": 16 * tp,
        "seq_length": seq,
        "max_position_embeddings": seq,
        "global_batch_size": micro_batches * (world_size // (tp * cp * pp)),
    }
    if args.kv_channels:
        sizes["kv_channels"] = 8
    if args.num_experts:
        sizes["num_experts"] = min(args.num_experts, ep * min(args.num_experts // ep, 4))
        sizes["moe_router_topk"] = min(args.moe_router_topk, sizes["num_experts"])
        sizes["moe_ffn_hidden_size"] = 16 * (args.expert_tensor_parallel_size or tp)
        if args.moe_shared_expert_intermediate_size:
            sizes["moe_shared_expert_intermediate_size"] = 16 * tp
    return sizes


def command_line(argv: Sequence[str], num_steps: int, full_size: bool, world_size: int | None) -> tuple[list[str], int]:
    """The words for pretrain_gpt.py and the number of ranks.

    Raises: ConfigError if a word of `argv` cannot be read.
    """
    parser = build_parser()
    path = yaml_config.find_path(argv)
    argv = list(argv) if path is None else yaml_config.words_from_file(path, parser.specs) + list(argv)
    given = read_command_line(parser, argv)
    if given.problems:
        raise ConfigError("\n".join(given.problems))
    args = fill_defaults(parser, given)
    world_size = world_size or env.world_size() or smallest_world(args)
    added = [*FORCED.split(), "--train-iters", str(num_steps)]
    if args.lr is None:
        added += ["--lr", "1e-3"]
    sizes = {} if full_size else small_sizes(args, world_size)
    for dest, value in sizes.items():
        if given.values.get(dest, value) >= value or dest == "global_batch_size":
            added += ["--" + dest.replace("_", "-"), str(value)]
    dropped = {spec.dest for topic in LEFT_OUT for spec in flag_specs(TOPICS[topic])} | {"yaml_cfg", "world_size"}
    return without(argv, dropped, parser) + added, world_size


def run_rank(rank: int, world_size: int, port: int, words: Sequence[str], output: str) -> None:
    """Be one rank of pretrain_gpt.py in this process, which ends with it."""
    import pretrain_gpt

    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    env.become_rank(rank, world_size, port)
    env.set_default("GLOO_SOCKET_IFNAME", "lo")
    sys.argv = ["pretrain_gpt.py", *words]
    sys.exit(pretrain_gpt.main())


def run(words: Sequence[str], world_size: int) -> int:
    """Start the ranks, wait for them, print what they said; returns the exit code."""
    import pretrain_gpt  # noqa: F401  once, before the ranks are forked

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, port, words, str(outputs[rank])))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode or 0 for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        for rank in failed or [0]:
            print(f"--- rank {rank} ended with {codes[rank]} ---\n{outputs[rank].read_text()[-20000:]}")
    return max(2 if code == 2 else int(code != 0) for code in codes)


def main(argv: Sequence[str] | None = None) -> int:
    """Check one configuration."""
    parser = argparse.ArgumentParser(description="Check the streams of a training configuration.", allow_abbrev=False)
    parser.add_argument("--world-size", type=int, help="number of ranks")
    parser.add_argument("--full-size", action="store_true", help="keep widths, lengths and batch sizes")
    parser.add_argument("--steps", type=int, default=2, help="training steps")
    options, flags = parser.parse_known_args(argv)
    try:
        words, world_size = command_line(flags, options.steps, options.full_size, options.world_size)
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    print(f"{world_size} ranks: pretrain_gpt.py {' '.join(words)}", flush=True)
    return run(words, world_size)


if __name__ == "__main__":
    sys.exit(main())
