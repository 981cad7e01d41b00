"""`pretrain_gpt.py` with pipeline stages: the bits of one rank, evaluation and router figures included."""

import os
import random
import re
import signal
import time

import pytest

from megatron.training.checkpoint_paths import complete_iterations, read_tracker
from tests.common.broken_ranks import BEAT_S, start_broken_run
from tests.common.forked_run import RankResult, run_ranks, wait_ranks
from tests.common.token_files import write_tokens

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


@pytest.mark.full
@pytest.mark.parametrize("stages", [PP2, VPP2])
def test_whole_validation_set_has_the_loss_of_one_rank(tmp_path, stages: str) -> None:
    """The set has an odd number of batches, which groups of microbatches need not divide."""
    draw = random.Random(5)
    documents = [[draw.randrange(499) for _ in range(17)] for _ in range(20)]
    prefix = write_tokens(tmp_path / "set", documents)
    whole = f"--full-validation --train-data-path {prefix} --valid-data-path {prefix}"
    one, cut = (
        run_ranks(size, f"{FLAGS.replace('--mock-data', '')} {whole} {flags}".split())
        for size, flags in ((1, ""), (2, stages))
    )
    assert [rank.status for rank in cut] == [0, 0], cut[0].output[-3000:]
    losses = [re.findall(r"validation loss at iteration \d+ \| lm loss value: (\S+)", r[-1].output) for r in (one, cut)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


def at_third_step(stage, action):
    """Let `stage` do something at the start of its third step."""

    def at_step(rank, step):
        if rank == stage and step == 3:
            time.sleep(3 * BEAT_S)  # until this place has been posted
            action()

    return at_step


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_signal_to_one_stage_lets_all_save_at_one_step(tmp_path, stage: int) -> None:
    save = tmp_path / "checkpoints"
    flags = f"{PP2} --num-layers 2 --exit-signal-handler --save-interval 2 --save {save}"
    terminate = at_third_step(stage, lambda: os.kill(os.getpid(), signal.SIGTERM))
    results = wait_ranks(start_broken_run(tmp_path, flags, 2, terminate), tmp_path)
    assert [result.status for result in results] == [0, 0], results[0].output[-3000:]
    assert (read_tracker(save), complete_iterations(save)) == (3, [2, 3])


@pytest.mark.full
def test_stage_that_dies_is_named_by_the_other(tmp_path) -> None:
    kill = at_third_step(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    first, last = wait_ranks(start_broken_run(tmp_path, f"{PP2} --num-layers 2", 2, kill), tmp_path)
    assert (first.status, last.status) == (1, -signal.SIGKILL)
    assert "ranks behind: 1; seen from rank 0: step 3 (step), messages over pp" in first.output
    assert "Traceback" not in first.output


@pytest.mark.full
def test_stage_that_hangs_is_named_by_its_place(tmp_path) -> None:
    hang = at_third_step(1, lambda: time.sleep(30))
    first, _ = wait_ranks(start_broken_run(tmp_path, f"{PP2} --num-layers 2", 2, hang, timeout_s=12.0), tmp_path)
    assert first.status == 1
    assert re.search(r"RankFailure: .*; ranks behind: 1; seen from rank 0: step 3 ", first.output), first.output[-2000:]
