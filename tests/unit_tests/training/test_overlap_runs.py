"""The program itself with the combined schedule: equal state hashes, counters, refusals."""

import functools
import os
import sys
from pathlib import Path

import pytest

from tests.common.forked_run import DEADLINE_S, free_port, start_ranks, wait_ranks

MODEL = (
    "--device cpu --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 6 --lr 1e-2 --train-iters 3 "
    "--tokenizer-type NullTokenizer --vocab-size 32 --mock-data --num-workers 0 --make-vocab-size-divisible-by 1 "
    "--log-interval 1 --eval-iters 0 --log-state-hash --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --moe-layer-freq ([1]+[0]) --bf16 "
    "--moe-grouped-gemm --moe-shared-expert-intermediate-size 8 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"
)
OVERLAP = "--overlap-moe-expert-parallel-comm"
VARIANTS = ("", OVERLAP, f"{OVERLAP} --delay-wgrad-compute --ep-overlap-early-attn-memory-release --log-overlap")


def run_all(ports: list[int]) -> int:
    """Body of a rank: the variants one after the other in one process, each with a rendezvous of its own."""
    import pretrain_gpt

    for variant, port in zip(VARIANTS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        print(f"variant {variant}", flush=True)
        sys.argv = ["pretrain_gpt.py", *MODEL.split(), *variant.split()]
        status = pretrain_gpt.main()
        if status:
            return status
    return 0


@pytest.mark.timeout(200)
def test_overlap_and_delayed_weight_gradients_train_the_same_bits(tmp_path: Path):
    body = functools.partial(run_all, [free_port() for _ in VARIANTS])
    ranks = wait_ranks(start_ranks(2, body, tmp_path), tmp_path, DEADLINE_S * len(VARIANTS))
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].output[-3000:] + ranks[1].output[-3000:]
    hashes = ranks[1].hashes()
    assert len(hashes) == 9
    assert hashes[:3] == hashes[3:6] == hashes[6:]
    off, on, delayed = ranks[0].output.split("variant ")[1:]
    assert "pairs overlapped" not in off
    assert "'pairs overlapped': 6" in on
    assert "'stages on the comm stream': 36" in on
    assert "'wgrads deferred': 0" not in delayed
    assert "'wgrads deferred'" in delayed
    assert "hidden communication" not in ranks[1].output  # a CPU has no clock to measure it with
