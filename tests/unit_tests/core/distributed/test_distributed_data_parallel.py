"""Accumulation, readiness and reduction of gradients; T03 and T04 of the known traps, one process and two ranks."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.common.collective_log import CollectiveLog, compare_logs
from tests.common.forced_router import all_to_experts
from tests.common.layouts import Layout
from tests.unit_tests.layouts.cases import check_against_reference, make_batch, make_case


class TwoLayers(torch.nn.Module):
    """x [n, 3] -> first -> second -> [n, 2]; `unused` exists on demand and takes no part in forward."""

    def __init__(self, dtype=torch.float32, has_unused=False):
        super().__init__()
        self.first = torch.nn.Linear(3, 4, dtype=dtype)
        self.second = torch.nn.Linear(4, 2, dtype=dtype)
        if has_unused:
            self.unused = torch.nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Weights(torch.nn.Module):
    """One parameter of each given length, all ones; the loss is the sum of w_i * scales_i, used in the given order."""

    def __init__(self, **numels):
        super().__init__()
        for name, numel in numels.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(numel)))

    def forward(self, scales):
        total = torch.zeros(())
        for name, scale in scales.items():
            total = total + (getattr(self, name) * scale).sum()
        return total


def wrap(module, per_token=False, **ddp_fields):
    config = ModelParallelConfig(calculate_per_token_loss=per_token)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**ddp_fields), module)


def test_gradient_ends_in_main_grad_only():
    model = wrap(Weights(a=2))
    model({"a": 3.0}).backward()
    model.finish_grad_sync()
    assert model.module.a.main_grad.tolist() == [3.0, 3.0]
    assert model.module.a.grad is None


@pytest.mark.parametrize(
    ("reduce_in_bf16", "dtype", "total"), [(False, torch.float32, 300.0), (True, torch.bfloat16, 256.0)]
)
def test_bf16_gradients_accumulate_in_fp32_by_default(reduce_in_bf16, dtype, total):
    module = Weights(a=1).bfloat16()
    model = wrap(module, grad_reduce_in_bf16=reduce_in_bf16)
    for _ in range(300):  # bf16 cannot count beyond 256
        model({"a": 1.0}).backward()
    assert module.a.main_grad.dtype == dtype
    assert module.a.main_grad.item() == total


def test_fp64_gradients_stay_fp64():
    module = Weights(a=1).double()
    wrap(module)
    assert module.a.main_grad.dtype == torch.float64


def test_two_microbatches_equal_one_of_twice_the_size():
    torch.manual_seed(1)
    module, data = TwoLayers(torch.float64), torch.randn(2, 3, dtype=torch.float64)
    model = wrap(module)
    model(data).sum().backward()
    model.finish_grad_sync()
    expected = [param.main_grad.clone() for param in module.parameters()]
    model.zero_grad_buffer()
    with model.no_sync():
        model(data[:1]).sum().backward()
    model(data[1:]).sum().backward()
    model.finish_grad_sync()
    for param, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.main_grad, grad, rtol=1e-9, atol=0.0)


def poisoned_second_step(poison):
    torch.manual_seed(1)
    module = TwoLayers()
    model = wrap(module, overlap_grad_reduce=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    data = torch.randn(2, 4, 3)
    for step in range(2):
        model.zero_grad_buffer()
        model(data[step]).sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        for buffer in model.buffers_by_kind.values():
            if step == 0:
                buffer.grad_data.fill_(poison)
    return [param.detach().clone() for param in module.parameters()]


def test_poisoned_buffer_does_not_reach_the_next_step():
    clean, poisoned = poisoned_second_step(0.0), poisoned_second_step(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert all(bool(tensor.isfinite().all()) for tensor in poisoned)


def test_second_reported_microbatch_is_refused():
    model = wrap(Weights(a=1, b=1), overlap_grad_reduce=True)
    model({"a": 1.0}).backward()
    with pytest.raises(AssertionError, match="'a' was marked ready twice"):
        model({"a": 1.0}).backward()


def test_deferred_parameter_is_reported_by_hand_only():
    module = Weights(a=1, b=1)
    module.a.skip_backward_post_hook = True
    model = wrap(module, overlap_grad_reduce=True)
    model({"a": 1.0, "b": 2.0}).backward()
    with pytest.raises(RuntimeError, match="no gradient arrived in the last microbatch for a;"):
        model.finish_grad_sync()
    model.mark_param_ready(module.a)
    model.finish_grad_sync()


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_gradient_stops_with_rank_and_name(overlap):
    model = wrap(Weights(good=1, bad=1), check_for_nan_in_grad=True, overlap_grad_reduce=overlap)
    with pytest.raises(RuntimeError, match=r"rank 0: check_for_nan_in_grad=True: .* gradient of bad "):
        run_whole_step(model, {"good": 1.0, "bad": float("nan")})


def test_fp16_overflow_is_left_to_the_optimizer():
    module = Weights(a=1).half()
    ddp_config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    model = DistributedDataParallel(ModelParallelConfig(fp16=True), ddp_config, module)
    run_whole_step(model, {"a": float("inf")})
    assert module.a.main_grad.item() == float("inf")


def run_whole_step(model, scales):
    model(scales).backward()
    model.finish_grad_sync()


def test_frozen_parameters_have_no_gradient_memory():
    module = Weights(a=1, b=1)
    module.b.requires_grad = False
    model = wrap(module)
    assert list(model.params) == ["a"]
    assert not hasattr(module.b, "main_grad")


def bucket_names(**ddp_fields):
    return [list(b.params) for b in wrap(Weights(a=30, b=30, c=30, d=30), **ddp_fields).bucket_groups]


def test_bucket_sizes_follow_the_flags():
    assert bucket_names() == [["d", "c", "b", "a"]]
    assert bucket_names(bucket_size=30) == [["d", "c", "b", "a"]]
    assert bucket_names(bucket_size=60, overlap_grad_reduce=True) == [["d", "c"], ["b", "a"]]
    assert bucket_names(num_buckets=4, overlap_grad_reduce=True) == [["d"], ["c"], ["b"], ["a"]]


def test_disabled_bucketing_gives_one_bucket():
    config = DistributedDataParallelConfig(bucket_size=1, overlap_grad_reduce=True)
    model = DistributedDataParallel(ModelParallelConfig(), config, Weights(a=1, b=1), disable_bucketing=True)
    assert len(model.bucket_groups) == 1


def test_padded_buckets_are_multiples_of_65536():
    model = wrap(Weights(a=3), pad_buckets_for_high_nccl_busbw=True)
    assert model.bucket_groups[0].grad_data.numel() == 65536


def test_state_dict_is_the_modules():
    module = Weights(a=2)
    model = wrap(module)
    assert list(model.state_dict()) == ["a"]
    model.load_state_dict({"a": torch.tensor([7.0, 8.0])})
    assert module.a.tolist() == [7.0, 8.0]


# Two ranks.


def reduced_gradients(ep, per_token, average, overlap):
    """Dense gradient 1 on rank 0 and 3 on rank 1, expert gradient 10 and 30."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    module = Weights(dense=1, expert=1)
    module.expert.allreduce = ep == 1
    model = wrap(module, per_token, average_in_collective=average, overlap_grad_reduce=overlap)
    scale = 1.0 + 2.0 * dist.get_rank()
    with CollectiveLog() as log:
        model({"dense": scale, "expert": 10.0 * scale}).backward()
        model.finish_grad_sync()
    return module.dense.main_grad.item(), module.expert.main_grad.item(), dict(log.counts())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("ep", "per_token", "average", "dense", "experts"),
    [
        (1, False, False, 2.0, (20.0, 20.0)),
        (1, False, True, 2.0, (20.0, 20.0)),
        (1, True, False, 4.0, (40.0, 40.0)),
        (2, False, False, 2.0, (5.0, 15.0)),
        (2, False, True, 2.0, (5.0, 15.0)),
        (2, True, False, 4.0, (10.0, 30.0)),
    ],
)
def test_two_ranks_reduce_dense_and_expert_gradients(pool, ep, per_token, average, dense, experts, overlap):
    first, second = pool.run(reduced_gradients, ep, per_token, average, overlap, world_size=2)
    assert (first[:2], second[:2]) == ((dense, experts[0]), (dense, experts[1]))
    assert first[2] == second[2] == {("allreduce_", "dp_cp"): 1}


class TwoExperts(torch.nn.Module):
    """Each expert multiplies its rows; `chosen` [n] says which; an expert without rows multiplies an empty slice."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x, chosen):
        return sum(expert(x[chosen == i]).sum() for i, expert in enumerate(self.experts))


def step_without_tokens_for_expert_1():
    model = wrap(TwoExperts(), overlap_grad_reduce=True, bucket_size=1)
    for _ in range(2):
        model.zero_grad_buffer()
        with CollectiveLog() as log:
            with model.no_sync():
                model(torch.ones(3, 2), torch.zeros(3)).backward()
            model(torch.ones(3, 2), torch.zeros(3)).backward()
            model.finish_grad_sync()
    grads = [expert.weight.main_grad.tolist() for expert in model.module.experts]
    return log.count("allreduce_"), len(model.bucket_groups), grads


def ddp_over_two_ranks(function, *args):
    parallel_state.initialize_model_parallel()
    return function(*args)


def test_expert_without_tokens_reports_a_zero_gradient(pool):
    for result in pool.run(ddp_over_two_ranks, step_without_tokens_for_expert_1, world_size=2):
        assert result == (2, 2, [[[6.0, 6.0], [6.0, 6.0]], [[0.0, 0.0], [0.0, 0.0]]])


def step_with_unused_parameter():
    model = wrap(TwoLayers(has_unused=True), overlap_grad_reduce=True)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError) as error:
        model.finish_grad_sync()
    return str(error.value)


def test_parameter_outside_forward_is_named_within_five_seconds(pool):
    texts = pool.run(ddp_over_two_ranks, step_with_unused_parameter, world_size=2, deadline_s=5.0)
    for rank, text in enumerate(texts):
        assert text.startswith(
            f"rank {rank}: overlap_grad_reduce=True: no gradient arrived in the last microbatch for unused;"
        )


def step_with_own_order():
    """Rank 0 uses a before b, rank 1 b before a, so that their buckets become full in opposite orders."""
    model = wrap(Weights(a=128, b=256), overlap_grad_reduce=True, bucket_size=1)
    order = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    with CollectiveLog() as log:
        model(dict.fromkeys(order, 1.0)).backward()
        model.finish_grad_sync()
    return log.records


def test_buckets_start_in_the_same_order_on_all_ranks(pool):
    logs = pool.run(ddp_over_two_ranks, step_with_own_order, world_size=2)
    assert compare_logs(logs) == []
    assert [record.numels for record in logs[0]] == [(256,), (128,)]


def broadcast_values(ep):
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    module = Weights(dense=1, expert=1)
    module.expert.allreduce = False
    module.dense.data.fill_(dist.get_rank())
    module.expert.data.fill_(10 + dist.get_rank())
    wrap(module).broadcast_params()
    return module.dense.item(), module.expert.item()


def test_replicas_start_with_the_values_of_the_first(pool):
    assert pool.run(broadcast_values, 2, world_size=2) == [(0.0, 10.0), (0.0, 11.0)]
    assert pool.run(broadcast_values, 1, world_size=2) == [(0.0, 10.0), (0.0, 10.0)]


def test_moe_with_an_idle_expert_reduces_each_bucket_once(pool):
    """Two experts, all tokens to expert 0; one bucket per parameter."""
    case = make_case(num_moe_experts=2, moe_router_topk=1, moe_router_pre_softmax=True)
    layout = Layout(dp=2, overlap_grad_reduce=True, bucket_size=1)
    got = check_against_reference(pool, case, layout, make_batch(), plan=all_to_experts((0,), 1))
    assert not got.grads["decoder.layers.1.mlp.experts.linear_fc1.weight1"].any()
    for log in got.logs:
        reductions = [record for record in log if any("bucket_group.py" in frame for frame in record.where)]
        assert len(reductions) == len(got.grads)


def test_wrapper_and_its_buffers_are_freed_when_dropped():
    model = torch.nn.Linear(3, 2)
    chunk = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), model)
    chunk(torch.ones(1, 3)).sum().backward()
    alive = weakref.ref(chunk)
    del chunk
    gc.collect()
    assert alive() is None
