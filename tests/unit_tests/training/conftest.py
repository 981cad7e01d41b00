"""Fixtures of the tests that run the whole program in their process."""

from __future__ import annotations

import pytest

TINY = (
    "--device cpu --transformer-impl local --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 1 "
    "--lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 32 --mock-data --num-workers 0 --disable-bias-linear "
    "--make-vocab-size-divisible-by 1 --log-interval 1 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-aux-loss-coeff 0.01 --log-state-hash --log-num-zeros-in-grad "
)
FEW_DOCUMENTS = 200
"""As made-up data: the order of the samples of more takes longer than the steps."""


@pytest.fixture
def no_launcher(monkeypatch):
    """No launcher has started this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fresh_program():
    """The test finds no program running, and leaves none."""
    from tests.common.training_runs import fresh_program

    with fresh_program():
        yield


@pytest.fixture
def start(fresh_program, capfd, monkeypatch):
    """Train a tiny mixture: the run and its log; `is_captured` replays steps through the stand-in for a capture."""
    from megatron.core.datasets import mock_gpt
    from megatron.core.full_iteration_graph.checks import CheckedRecording
    from megatron.training import training
    from megatron.training.guarded_steps import GuardedSteps, build_guarded_steps
    from tests.common.mutants import replaced
    from tests.common.training_runs import train

    monkeypatch.setattr(mock_gpt, "NUM_DOCUMENTS", FEW_DOCUMENTS)

    def run(flags, is_captured=False, **options):
        def build(run):
            return GuardedSteps(run, CheckedRecording) if is_captured else build_guarded_steps(run)

        with replaced(training, "build_guarded_steps", build):
            finished = train(TINY + flags, **options)
        captured = capfd.readouterr()
        return finished, captured.out + captured.err

    return run
