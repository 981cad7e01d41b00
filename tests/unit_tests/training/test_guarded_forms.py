"""What breaks a capture elsewhere: each of it trains under the stand-in for a capture as it does eagerly."""

import pytest

from tests.common.training_runs import assert_same_run

SHORT = "--train-iters 5 --global-batch-size 2 --eval-interval 2 --eval-iters 1 --cuda-graph-warmup-steps 2 "
FORMS = {
    "timers": "--timing-log-level 2",
    "figures of everything": "--log-params-norm --moe-per-layer-logging --log-interval 2",
    "per-token loss": "--calculate-per-token-loss",
    "masks by document": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--attention-dropout 0 --hidden-dropout 0",
    "recompute of parts": "--recompute-granularity selective --recompute-modules moe --attention-dropout 0 "
    "--hidden-dropout 0",
    "passed-over step": "--iterations-to-skip 4",
    "sums in sequence": "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3",
    "sums over all": "--moe-router-load-balancing-type global_aux_loss",
    "noise": "--moe-input-jitter-eps 0.01",
    "forced routing": "--moe-router-force-load-balancing",
    "groups of experts": "--moe-router-num-groups 2 --moe-router-group-topk 1",
    "shared expert": "--moe-shared-expert-intermediate-size 8",
    "sgd": "--optimizer sgd",
    "moments in bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --use-distributed-optimizer --bf16",
    "dense": "--moe-layer-freq [0] --ffn-hidden-size 16",
    "bf16": "--bf16",
    "allgather": "--moe-token-dispatcher-type allgather",
    "drop-pad": "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "flex": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
    "gated": "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --ffn-hidden-size 16",
}


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_captured_form_trains_as_the_eager_one(start, form):
    _, eager = start(SHORT + FORMS[form])
    run, log = start(SHORT + FORMS[form], is_captured=True)
    assert_same_run(eager, log)
    assert run.counters["graph captures"] == 2
    assert run.counters["graph replays"] >= 3
