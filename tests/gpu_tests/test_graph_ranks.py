"""Captured steps of two ranks that share one GPU, NCCL inside the graphs: the state of eager runs, and every way out.

All runs of a test are in the same two processes, one after the other: a graph that outlived its process groups would
hang the next one.
"""

import re
import time

import pytest
import torch

from tests.common.shared_gpu import run_ranks
from tests.gpu_tests.test_graph_exit import PROGRAM
from tests.gpu_tests.test_overlap_ranks import DELAYED, DISPATCHERS, EXACT, MODEL
from tools.run_metrics import parse_state_hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = "--cuda-graph-warmup-steps 2 --train-iters "
NUM_STEPS, NUM_STAGE_STEPS = 8, 5
GRAPH = "--cuda-graph-impl full_iteration "
BUDGET = "--moe-expert-rank-capacity-factor 2.0 "
TIGHT = "--moe-expert-rank-capacity-factor 0.6 --moe-rank-capacity-tiers 2.0 "
PP2 = "--expert-model-parallel-size 1 --pipeline-model-parallel-size 2 "
VPP2 = f"{PP2}--num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --moe-layer-freq ([1]+[0]+[1]+[1]) "
STAGES_PROGRAM = "tests/common/stage_progress.py "
SKEWED_PROGRAM = "tests/common/skewed_steps.py "
EXIT_LIMIT_S = 40.0


def compare(lines, num_steps, folder, limit_s):
    """Run the lines, the first of which is eager; all must leave its states. Returns the counters of each."""
    logs = run_ranks(2, [line.split() for line in lines], folder, limit_s)
    hashes = [parse_state_hashes("".join(rank[i] for rank in logs)) for i in range(len(lines))]
    counters = [dict(re.findall(r"'([a-z -]+)': (\d+)", rank[rank.index("counters:") :])) for rank in logs[0]]
    print(counters)
    assert len(hashes[0]) == num_steps
    for line, got in zip(lines[1:], hashes[1:], strict=True):
        assert got == hashes[0], line
    assert all(int(found["graph replays"]) >= num_steps - 2 for found in counters[1:])
    return counters


def test_expert_ranks_replay_their_exchanges(tmp_path):
    line = f"{MODEL}{EXACT}{DISPATCHERS['alltoall']}{LENGTH}{NUM_STEPS} "
    captured = [BUDGET, TIGHT, BUDGET + DELAYED]
    counters = compare([line, *(line + GRAPH + flags for flags in captured)], NUM_STEPS, tmp_path, 110)
    assert [int(found["re-runs"]) > 0 for found in counters[1:]] == [False, True, False]


def test_chosen_steps_overflow_and_the_graph_survives(tmp_path):
    """All tokens go to one rank in two steps; the state afterwards, expert bias included, is that of eager steps."""
    router = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --lr 1e-3 "
    line = f"{SKEWED_PROGRAM}5,7 {MODEL}{EXACT}{DISPATCHERS['alltoall']}{router}{LENGTH}{NUM_STEPS} "
    _, found = compare([line, f"{line}{GRAPH}--moe-expert-rank-capacity-factor 1.9 "], NUM_STEPS, tmp_path, 60)
    assert (int(found["row overflows"]), int(found["re-runs"])) == (2, 2)
    assert (int(found["graph captures"]), int(found["graph replays"])) == (1, 6)


@pytest.mark.parametrize("stages", [PP2, VPP2], ids=["pp2", "vpp2"])
def test_stages_replay_their_messages(tmp_path, stages):
    short = f"{LENGTH}{NUM_STAGE_STEPS} --global-batch-size 4 "
    line = STAGES_PROGRAM + MODEL + EXACT + DISPATCHERS["alltoall"] + stages + short
    compare([line, line + GRAPH], NUM_STAGE_STEPS, tmp_path, 52)


def test_rank_that_fails_after_replays_ends_within_seconds(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    line = f"{program} fail {MODEL}{DISPATCHERS['alltoall']}{GRAPH}{BUDGET}--train-iters 1000"
    with pytest.raises(AssertionError, match="within 90"):
        run_ranks(2, [line.split()], tmp_path, 90)
    ended = time.time()
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)]
    assert any("a failure after a replay" in log for log in logs)
    assert "captured a graph" in logs[0]
    seconds = ended - max(float(text) for log in logs for text in re.findall(r"event ([\d.]+)", log))
    print(f"ended {seconds:.1f} s after the failure")
    assert seconds <= EXIT_LIMIT_S
