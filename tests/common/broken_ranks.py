"""Runs of `pretrain_gpt.py` in which a rank dies, stops or hangs at a chosen step, with short time limits."""

import sys
from collections.abc import Callable
from pathlib import Path

from tests.common.forked_run import start_ranks

BEAT_S = 0.2
FLAGS = (
    "--device cpu --transformer-impl local --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 6 "
    "--train-iters 500 --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 32 --mock-data --num-workers 0 "
    "--make-vocab-size-divisible-by 1 --log-interval 1 --eval-iters 0 "
)


def start_broken_run(
    folder: Path,
    flags: str,
    world_size: int,
    at_step: Callable[[int, int], None],
    timeout_s: float = 60.0,
    agreement_s: float = 60.0,
) -> list[int]:
    """Fork the ranks of a run that calls `at_step(rank, step)` at the start of each step; returns the process ids."""
    import pretrain_gpt
    from megatron.core.utils.logging import get_rank
    from megatron.training import heartbeat, initialize
    from megatron.training.callbacks import exit as exit_callback
    from megatron.training.global_vars import get_args

    plain_step, plain_init = pretrain_gpt.forward_step, initialize.init_distributed
    num_calls = [0]

    def forward_step(data_iterator, model):
        num_calls[0] += 1
        per_step = get_args().global_batch_size // (get_args().micro_batch_size * get_args().data_parallel_size)
        if (num_calls[0] - 1) % per_step == 0:
            at_step(get_rank(), (num_calls[0] - 1) // per_step + 1)
        return plain_step(data_iterator, model)

    def init_distributed(args, device):
        args.distributed_timeout_minutes = timeout_s / 60
        plain_init(args, device)

    def body() -> int:
        pretrain_gpt.forward_step, initialize.init_distributed = forward_step, init_distributed
        heartbeat.INTERVAL_S, exit_callback.AGREEMENT_TIMEOUT_S = BEAT_S, agreement_s
        sys.argv = ["pretrain_gpt.py", *(FLAGS + flags).split()]
        return pretrain_gpt.main()

    return start_ranks(world_size, body, folder)
