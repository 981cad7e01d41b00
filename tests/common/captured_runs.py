"""Runs on a GPU whose steps may be captured: model, flags, disturbances between steps, what equal runs share.

The hash of the state goes through the host, so it is taken every few steps; a difference in one step stays in all later
ones.
"""

import os

import torch

from megatron.training.callbacks.base import Callback
from tests.common.training_runs import VARYING
from tools.run_metrics import parse_log, parse_state_hashes

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

MODEL = (
    "--device cuda --transformer-impl local --bf16 --num-layers 2 --hidden-size 128 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-dtype fp32 "
    "--moe-grouped-gemm --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --micro-batch-size 4 --global-batch-size 16 --lr 2e-3 --lr-warmup-iters 4 "
    "--tokenizer-type NullTokenizer --vocab-size 500 --mock-data --num-workers 0 --log-interval 1 "
    "--log-num-zeros-in-grad --eval-iters 2 --deterministic-mode --log-state-hash --use-distributed-optimizer "
)
DROP_PAD = "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity "
GRAPH = "--cuda-graph-impl full_iteration "
DROPOUT = {"0": "--attention-dropout 0 --hidden-dropout 0 ", "0.1": "--attention-dropout 0.1 --hidden-dropout 0.1 "}


class Disturbances(Callback):
    """What happens between steps: the cache is emptied, and memory is taken, filled and given back."""

    def on_step_end(self, run, result):
        if run.state.iteration % 7 == 0:
            torch.cuda.empty_cache()
        blocks = [torch.full((size << 20,), 0xFF, dtype=torch.uint8, device="cuda") for size in (1, 8, 64)]
        if run.state.iteration % 3 == 0:
            del blocks[0]


class SwitchOn(Callback):
    """Lets a run of one rank overlap, which the program refuses: nothing needs to be hidden there."""

    def __init__(self, delays_wgrad: bool) -> None:
        self.delays_wgrad = delays_wgrad

    def on_train_start(self, run):
        for chunk in run.model:
            chunk.config.overlap_moe_expert_parallel_comm = True
            chunk.config.delay_wgrad_compute = self.delays_wgrad


def assert_equal_runs(eager_log, graph_log, num_lines):
    """Same state at every line of the log, same printed losses and router figures, same evaluations."""
    eager, graph = parse_state_hashes(eager_log), parse_state_hashes(graph_log)
    assert len(eager) == num_lines
    differing = [step for step in eager if eager[step] != graph.get(step)]
    assert not differing, f"state differs at step {differing[0]}, on {len(differing)} of {num_lines} lines"
    ours, theirs = parse_log(eager_log), parse_log(graph_log)
    figures = set(ours) - VARYING
    assert {"lm loss", "grad norm", "num zeros", "lm loss validation"} <= figures
    assert any("load_balancing_loss" in name for name in figures), figures
    for name in sorted(figures):
        assert ours[name] == theirs.get(name), name
