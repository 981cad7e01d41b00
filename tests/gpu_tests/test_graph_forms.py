"""Forms of a step that the stand-in for a capture replays on a CPU, replayed from real graphs: the state of eager runs.

All runs are in this process, in --deterministic-mode.
"""

import pytest
import torch

from tests.common.captured_runs import DROPOUT, GRAPH, assert_equal_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = "--train-iters 12 --log-interval 6 --eval-interval 6 --cuda-graph-warmup-steps 2 "
FORMS = {
    "sgd": ("--optimizer sgd", ""),
    "moments in bf16": ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", ""),
    "recompute": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
    "masks by document": ("--reset-attention-mask --reset-position-ids --eod-mask-loss", ""),
    "sums over all": ("--moe-router-load-balancing-type global_aux_loss --moe-z-loss-coeff 1e-3", ""),
    "shared expert": ("--moe-shared-expert-intermediate-size 128 --calculate-per-token-loss", ""),
    "hybridep": (
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        "--moe-expert-rank-capacity-factor 1.2",
    ),
    "timers": ("--timing-log-level 2 --log-params-norm", ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_captured_form_trains_as_the_eager_one(start, form):
    common, captured_only = FORMS[form]
    flags = f"{DROPOUT['0']}{LENGTH}{common} "
    _, eager_log = start(flags)
    run, log = start(f"{flags}{GRAPH}{captured_only}")
    print(form, dict(run.counters))
    assert_equal_runs(eager_log, log, 3)
    assert run.counters["graph replays"] >= 10
