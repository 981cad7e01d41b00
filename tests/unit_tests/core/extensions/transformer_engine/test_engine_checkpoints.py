"""A run saved with one implementation goes on with the other: weights, moments and histories bit for bit."""

import pytest
import torch

from tests.common.engine_runs import passage_job
from tests.common.layouts import Layout
from tests.common.resharding import differences, join_passages, load_and_go_on, train_and_save
from tests.unit_tests.layouts.cases import make_case
from tests.unit_tests.layouts.test_checkpoint_matrix import FIELDS, SHAPE, WIDE

ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 99}
CASES = {
    "experts": (make_case(SHAPE, **FIELDS, moe_layer_freq=1), Layout(dp=2, ep=2, is_grouped=True, **ZERO)),
    "mixed": (make_case(SHAPE, **FIELDS, moe_layer_freq=[0, 1, 1, 0]), Layout(tp=2, is_sequence_parallel=True)),
    "fp8": (
        make_case(SHAPE, **FIELDS | WIDE, moe_layer_freq=[0, 1, 1, 0], fp8="hybrid", fp8_amax_history_len=3),
        Layout(is_grouped=True, micro_batch_size=2, dtype=torch.bfloat16),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("is_engine_first", [True, False], ids=["to local", "to the engine"])
@pytest.mark.parametrize("name", CASES)
def test_run_goes_on_in_the_other_implementation(pool, tmp_path, name, is_engine_first):
    case, layout = CASES[name]
    save, load = (case, layout, tmp_path, {}), (case, layout, {"a": tmp_path}, {})
    if is_engine_first:
        saved = pool.run(passage_job, train_and_save, *save, world_size=layout.world_size)
        loaded = pool.run(load_and_go_on, *load, world_size=layout.world_size)
    else:
        saved = pool.run(train_and_save, *save, world_size=layout.world_size)
        loaded = pool.run(passage_job, load_and_go_on, *load, world_size=layout.world_size)
    before, after = join_passages(saved), join_passages([rank["a"] for rank in loaded])
    assert differences(before, after) == []
    assert after.losses == pytest.approx(before.losses, rel=1e-9 if layout.dtype is torch.float64 else 2e-2)
