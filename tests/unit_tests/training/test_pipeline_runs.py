"""`pretrain_gpt.py` with pipeline stages: the bits of one rank, evaluation and router figures included."""

import re

import pytest

from tests.common.forked_run import RankResult, run_ranks

FLAGS = (
    "--device cpu --transformer-impl local --num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --global-batch-size 4 --micro-batch-size 1 --train-iters 3 --lr 1e-2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--log-state-hash --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights "
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
    "--log-params-norm --log-num-zeros-in-grad"
)
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
MASKS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"


def run(world_size: int, *flags: str) -> RankResult:
    """The rank that logs."""
    ranks = run_ranks(world_size, " ".join((FLAGS, *flags)).split())
    assert [rank.status for rank in ranks] == [0] * world_size, ranks[0].output[-3000:] + ranks[-1].output[-3000:]
    assert all("iteration        1/" not in rank.output for rank in ranks[:-1])
    return ranks[-1]


def figures(result: RankResult) -> list[str]:
    """What the log lines say, without times."""
    lines = [line for line in result.output.splitlines() if "iteration" in line and "|" in line]
    return [re.sub(r"^ \[[^]]*\]|elapsed time per iteration \(ms\): [0-9.]+", "", line) for line in lines]


def test_stages_log_what_one_rank_logs() -> None:
    """MoE layers stand on the last stage only; every figure and the hash of all weights and moments are equal."""
    moe = "--moe-layer-freq ([0,0,0,1])"
    one, two = figures(run(1, moe)), figures(run(2, moe, VPP2))
    assert len(one) == 6
    assert two == one


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2} --moe-layer-freq ([0,1,0,0])",
        f"{PP2} --calculate-per-token-loss --no-overlap-p2p-communication",
        f"{VPP2} {MASKS} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        f"{PP2} --pipeline-model-parallel-layout Et|t|t|tL {MASKS} --iterations-to-skip 2",
        f"{PP2} --decoder-first-pipeline-num-layers 1 --moe-layer-freq 2",
    ],
)
def test_other_ways_to_cut_log_the_same(flags: str) -> None:
    pipeline = r"--(pipeline|num-virtual|decoder-first|no-overlap-p2p)\S*( (?!--)\S+)?"
    alone = re.sub(pipeline, "", flags)
    assert figures(run(2, flags)) == figures(run(1, alone))


@pytest.mark.full
def test_checkpoint_of_one_rank_goes_on_in_stages(tmp_path) -> None:
    straight = run(1).hashes()
    first = run(1, f"--save {tmp_path} --save-interval 2 --exit-interval 2").hashes()
    second = run(2, VPP2, f"--load {tmp_path}").hashes()
    assert first + second == straight
