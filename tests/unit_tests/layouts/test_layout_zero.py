"""The distributed optimizer against the fp64 reference, and bit for bit against the plain one."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import params_norm
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.common.collective_log import CollectiveLog, compare_logs
from tests.common.layouts import Layout, run_step
from tests.common.reference import assert_matches, make_weights
from tests.unit_tests.layouts.cases import (
    DP2,
    EP2,
    EP2_DP4,
    EP4,
    SEQ_LENGTH,
    VOCAB_SIZE,
    check_against_reference,
    make_batch,
    make_case,
    masked_batch,
)

DP4 = Layout(dp=4)
ZERO = {"use_distributed_optimizer": True}
REDUCE = ZERO | {"overlap_grad_reduce": True, "bucket_size": 200}
GATHER = REDUCE | {"overlap_param_gather": True}
ALL_LAYOUTS = [Layout(), DP2, DP4, EP2, EP2_DP4, EP4]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [(DP2, ZERO), (EP2_DP4, GATHER | {"average_in_collective": True})],
    ids=["dp2", "ep2_dp4_overlap_average"],
)
def test_sharded_gradients_and_norm_equal_reference(pool, layout, changes):
    got = check_against_reference(pool, make_case(), dataclasses.replace(layout, **changes), make_batch(layout.dp * 2))
    assert compare_logs(got.logs) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("is_average", "is_per_token"),
    [(False, False), (True, False), (False, True)],
    ids=["scaled", "average_in_collective", "per_token"],
)
@pytest.mark.parametrize("changes", [ZERO, REDUCE, GATHER], ids=["zero", "reduce", "gather"])
@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=str)
def test_every_sharded_layout_equals_reference(pool, layout, changes, is_average, is_per_token):
    layout = dataclasses.replace(layout, average_in_collective=is_average, **changes)
    case = make_case(calculate_per_token_loss=is_per_token, moe_aux_loss_coeff=0.05)
    check_against_reference(pool, case, layout, masked_batch([6, 1, 3, 2, 5, 6, 0, 4], num_samples=8))


def test_per_token_loss_divides_shards_once(pool):
    case, layout = make_case(calculate_per_token_loss=True), dataclasses.replace(EP2, **GATHER)
    check_against_reference(pool, case, layout, masked_batch([6, 0, 4, 0]))


@pytest.mark.parametrize("changes", [pytest.param(ZERO, marks=pytest.mark.full), GATHER], ids=["zero", "gather"])
def test_three_clipped_steps_end_with_the_weights_of_one_rank(pool, changes):
    case, batch = make_case(), make_batch()
    weights = make_weights(case.config(Layout()), case.shape, seed=3)
    options = {"steps": 3, "clip_grad": 0.5, "learning_rate": 0.3}
    one = run_step(pool, case, Layout(), batch, weights, **options)
    two = run_step(pool, case, dataclasses.replace(EP2, **changes), batch, weights, **options)
    one.grads, two.grads = one.params, two.params
    assert_matches(one, two)


@dataclass(frozen=True)
class Training:
    """A few Adam steps of a small model; what a comparison holds fixed."""

    ep: int = 1
    dtype: torch.dtype = torch.float32
    is_grouped: bool = False
    optimizer: str = "adam"
    clip_grad: float = 0.5
    steps: int = 3
    bucket_size: int = 1500
    is_precision_aware: bool = False
    main_grads: str = "fp32"
    reduces_in_bf16: bool = False


def train(training, is_sharded, overlap_grad_reduce, overlap_param_gather):
    """Weights, gradients and states by name after the last step, what steps returned, collectives, late gathers."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=training.ep)
    layout = Layout(ep=training.ep, dtype=training.dtype, is_grouped=training.is_grouped)
    config = make_case().config(layout)
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(config, get_gpt_decoder_block_spec(config), VOCAB_SIZE, SEQ_LENGTH)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=is_sharded,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        bucket_size=training.bucket_size,
        grad_reduce_in_bf16=training.reduces_in_bf16,
        main_grads_dtype=training.main_grads,
    )
    chunk = DistributedDataParallel(config, ddp_config, model)
    settings = OptimizerConfig(
        optimizer=training.optimizer,
        lr=0.01,
        clip_grad=training.clip_grad,
        bf16=training.dtype == torch.bfloat16,
        log_num_zeros_in_grad=True,
        use_distributed_optimizer=is_sharded,
        use_precision_aware_optimizer=training.is_precision_aware and is_sharded,
        main_grads_dtype=training.main_grads,
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    logged, late_gathers = [], []
    with CollectiveLog() as log:
        for step in range(training.steps):
            chunk.zero_grad_buffer()
            run_microbatches(chunk, step)
            logged.append(optimizer.step())
            poison_stale_parameters(chunk)
            if is_sharded:
                late_gathers.append(len(chunk.bucket_groups) - chunk.param_gather.num_started)
    state = {f"{s.name} {k}": t.clone() for s in optimizer.whole_state() for k, t in s.tensors.items()}
    state |= {f"{s.name} weight": s.param.detach().clone() for s in optimizer.whole_state()}
    norm = float(params_norm(model.parameters(), optimizer.pg_collection, torch.device("cpu")))
    return state, (logged, norm), log.records, late_gathers


def poison_stale_parameters(chunk):
    """Fill what no gather has been started for with NaN, own shard excepted: forward must wait for every bucket."""
    gather = chunk.param_gather
    if gather is not None:
        for bucket in gather.buckets[gather.num_started :]:
            own = bucket.param_shard.clone()
            bucket.sharded.data.fill_(float("nan"))
            bucket.param_shard.copy_(own)


def run_microbatches(chunk, step):
    """Two microbatches of one sample on each rank, other tokens in every step and on every rank."""
    rank = parallel_state.get_data_parallel_rank()
    batches = [make_batch(1, seed=100 * step + 10 * rank + i) for i in range(2)]

    def forward_step(iterator, model):
        batch = next(iterator)
        losses = model(batch.tokens, torch.arange(SEQ_LENGTH)[None], None, labels=batch.labels)

        def loss_func(output):
            return output.sum(), torch.tensor(SEQ_LENGTH), {"lm loss": torch.zeros(2)}

        return losses, loss_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[chunk],
        num_microbatches=2,
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
    )


def assert_equal_training(plain, sharded):
    """All ranks: equal bits of every tensor of a name; equal numbers in every log."""
    for (state, logged, *_), (other, other_logged, *_) in zip(plain, sharded, strict=True):
        assert logged == other_logged
        state = {name: tensor for name, tensor in state.items() if not name.endswith(" step")}
        assert set(state) <= set(other)
        assert [name for name, tensor in state.items() if not torch.equal(tensor, other[name])] == []


def check_bitwise(pool, training, world_size, reduce, gather):
    plain = pool.run(train, training, False, reduce, False, world_size=world_size)
    sharded = pool.run(train, training, True, reduce, gather, world_size=world_size)
    assert_equal_training(plain, sharded)
    assert compare_logs([records for _, _, records, _ in sharded]) == []
    return sharded


@pytest.mark.parametrize(
    ("training", "world_size", "reduce", "gather"),
    [
        pytest.param(Training(ep=2, is_grouped=True), 4, True, True, id="ep2_dp4_overlap_grouped"),
        pytest.param(Training(ep=2, dtype=torch.bfloat16), 2, True, True, id="ep2_bf16_overlap"),
    ],
)
def test_sharded_training_is_bitwise_the_plain_one(pool, training, world_size, reduce, gather):
    check_bitwise(pool, training, world_size, reduce, gather)


@pytest.mark.full
@pytest.mark.parametrize(("reduce", "gather"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_every_sharded_training_is_bitwise_the_plain_one(
    pool, world_size, ep, dtype, optimizer, clip_grad, reduce, gather
):
    training = Training(ep, dtype, is_grouped=dtype == torch.float32, optimizer=optimizer, clip_grad=clip_grad)
    check_bitwise(pool, training, world_size, reduce, gather)


@pytest.mark.parametrize(
    "training",
    [
        Training(is_precision_aware=True),
        pytest.param(Training(ep=2, dtype=torch.bfloat16, is_precision_aware=True), marks=pytest.mark.full),
    ],
    ids=["fp32", "ep2_bf16"],
)
def test_precision_aware_optimizer_with_fp32_states_has_the_bits_of_the_plain_one(pool, training):
    check_bitwise(pool, training, 2, False, False)


@pytest.mark.full
def test_bf16_main_gradients_have_the_bits_of_reduction_in_bf16(pool):
    """Without clipping, which rounds bf16 gradients once more."""
    wide = Training(ep=2, dtype=torch.bfloat16, clip_grad=0.0, reduces_in_bf16=True)
    aware = Training(ep=2, dtype=torch.bfloat16, clip_grad=0.0, is_precision_aware=True, main_grads="bf16")
    plain = pool.run(train, wide, False, False, False, world_size=2)
    assert_equal_training(plain, pool.run(train, aware, True, True, True, world_size=2))


def test_all_gathers_but_the_first_are_left_to_the_next_forward(pool):
    """A bucket for each of 15 dense and 4 expert parameters; the experts of a rank have no replica to gather from."""
    for _, _, records, late_gathers in pool.run(train, Training(ep=2, bucket_size=1), True, True, True, world_size=2):
        gathers = sum(record.op == "_allgather_base_" for record in records)
        assert (late_gathers, gathers) == ([18] * 3, 2 * 15 + 1)
