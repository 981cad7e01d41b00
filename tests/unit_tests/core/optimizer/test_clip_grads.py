"""Norm, zeros and clipping of the unsharded model; T01, T05 and T06 of the known traps as far as EP goes."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import (
    UniqueTensors,
    clip_by_total_norm,
    count_zeros,
    params_norm,
    total_norm,
    unique_tensors,
)
from megatron.core.process_groups_config import ProcessGroupCollection

CPU = torch.device("cpu")
ALONE = ProcessGroupCollection()


def parameter(numel, grad, dtype=torch.float64, **attributes):
    """A parameter of ones with a constant main gradient."""
    param = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
    param.main_grad = torch.full((numel,), grad, dtype=dtype)
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


def grads_of(params, groups):
    return unique_tensors([(param, param.main_grad) for param in params], groups)


def test_norm_of_three_and_four_is_five():
    tensors = UniqueTensors(dense=[torch.tensor([3.0])], expert=[torch.tensor([0.0, 4.0])])
    assert total_norm(tensors, ALONE, CPU).item() == 5.0
    assert total_norm(tensors, ALONE, CPU, math.inf).item() == 4.0


def test_norm_of_bf16_gradients_is_taken_in_fp32():
    norm = total_norm(UniqueTensors(dense=[torch.ones(1000, dtype=torch.bfloat16)]), ALONE, CPU)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(31.622776, rel=1e-6)


def test_bits_of_the_norm_do_not_depend_on_the_cut():
    generator = torch.Generator().manual_seed(2)
    for _ in range(100):
        whole = torch.randn(1000, generator=generator)
        parts = list(whole.split([64, 1, 500, 435]))
        assert total_norm(UniqueTensors(dense=[whole]), ALONE, CPU) == total_norm(UniqueTensors(parts), ALONE, CPU)


def test_norm_of_fp64_gradients_is_fp64():
    norm = total_norm(UniqueTensors(dense=[torch.ones(2, dtype=torch.float64)]), ALONE, CPU)
    assert norm.item() == 2.0**0.5


def test_other_norms_are_refused():
    with pytest.raises(ValueError, match=r"norm_type=1.0: only 2 and inf are defined"):
        total_norm(UniqueTensors(), ALONE, CPU, 1.0)


def test_no_gradients_at_all_have_norm_zero():
    assert total_norm(UniqueTensors(dense=[torch.ones(0)]), ALONE, CPU).item() == 0.0
    assert total_norm(UniqueTensors(), ALONE, CPU, math.inf).item() == 0.0


def test_tied_parameter_counts_once():
    param = parameter(4, 1.0)
    assert total_norm(grads_of([param, param], ALONE), ALONE, CPU).item() == 2.0


def test_longer_gradient_is_scaled_to_the_limit():
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    clip_by_total_norm(grads, 1.0, torch.tensor(5.0))
    assert [grad.item() for grad in grads] == pytest.approx([0.6, 0.8], rel=1e-6)


def test_shorter_gradient_keeps_its_bits():
    grads = [torch.tensor([0.1]), torch.tensor([0.2])]
    clip_by_total_norm(grads, 1.0, torch.tensor(0.3))
    assert torch.equal(torch.cat(grads), torch.tensor([0.1, 0.2]))


def test_nan_norm_leaves_finite_gradients_alone():
    grads = [torch.tensor([1.0])]
    clip_by_total_norm(grads, 1.0, torch.tensor(float("nan")))
    assert grads[0].item() == 1.0


def test_negative_zero_counts_as_zero():
    assert count_zeros(UniqueTensors(dense=[torch.tensor([0.0, -0.0, 1e-30])]), ALONE, CPU).item() == 2


def totals_with_experts_over_ep(num_zero_experts):
    """Rank-local part of a model with 10 dense elements and one expert of 6 elements per rank."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    is_zero = dist.get_rank() < num_zero_experts
    params = [parameter(10, 0.5), parameter(6, 0.0 if is_zero else 0.25, allreduce=False, tensor_model_parallel=True)]
    tensors = grads_of(params, groups)
    zeros = count_zeros(tensors, groups, CPU).item()
    return total_norm(tensors, groups, CPU).item(), params_norm(params, groups, CPU).item(), zeros


def test_experts_of_all_ranks_enter_norms_and_zero_count(pool):
    for norm, weights, zeros in pool.run(totals_with_experts_over_ep, 0, world_size=2):
        assert norm == pytest.approx((0.25 * 10 + 0.0625 * 12) ** 0.5, rel=1e-9)
        assert weights == pytest.approx((10 + 12) ** 0.5, rel=1e-9)
        assert zeros == 0


def test_zero_gradient_of_one_expert_counts_its_elements(pool):
    for norm, _, zeros in pool.run(totals_with_experts_over_ep, 1, world_size=2):
        assert norm == pytest.approx((0.25 * 10 + 0.0625 * 6) ** 0.5, rel=1e-9)
        assert zeros == 6


def totals_with_replicas_over_tp():
    """TP 2: a sharded and a replicated dense parameter, a sharded and a replicated expert, experts over TP."""
    world = dist.group.WORLD
    groups = ProcessGroupCollection(tp=world, mp=world, expt_tp=world, tp_ep_pp=world)
    params = [
        parameter(4, 1.0, tensor_model_parallel=True),
        parameter(8, 1.0),
        parameter(3, 1.0, allreduce=False, tensor_model_parallel=True),
        parameter(10, 1.0, allreduce=False),
    ]
    return total_norm(grads_of(params, groups), groups, CPU).item()


def test_replicas_over_tp_count_once(pool):
    expected = math.sqrt(4 * 2 + 8 + 3 * 2 + 10)
    assert pool.run(totals_with_replicas_over_tp, world_size=2) == pytest.approx([expected, expected], rel=1e-9)


def clip_with_unequal_experts():
    """Dense gradient of norm 4 on both ranks, expert gradients of norm 3 and 12: together 13."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    params = [parameter(4, 2.0), parameter(1, 3.0 if dist.get_rank() == 0 else 12.0, allreduce=False)]
    norm = total_norm(grads_of(params, groups), groups, CPU)
    clip_by_total_norm([param.main_grad for param in params], 1.3, norm)
    return norm.item(), params[0].main_grad, params[1].main_grad.item()


def test_ep_ranks_clip_by_one_norm(pool):
    (norm_0, dense_0, expert_0), (norm_1, dense_1, expert_1) = pool.run(clip_with_unequal_experts, world_size=2)
    assert norm_0 == norm_1 == 13.0
    assert torch.equal(dense_0, dense_1)
    assert dense_0.norm().item() == pytest.approx(0.4, rel=1e-6)
    assert (expert_0, expert_1) == pytest.approx((0.3, 1.2), rel=1e-6)


RANK_GRADS = {
    "one rank owns nothing": [UniqueTensors(expert=[torch.tensor([3.0]), torch.tensor([4.0])]), UniqueTensors()],
    "one rank owns experts only": [
        UniqueTensors(dense=[torch.tensor([3.0])]),
        UniqueTensors(expert=[torch.tensor([4.0])]),
    ],
    "both own experts": [UniqueTensors(expert=[torch.tensor([3.0])]), UniqueTensors(expert=[torch.tensor([4.0])])],
}


def norm_over_two_ranks(owners, norm_type):
    groups = ProcessGroupCollection(mp=dist.group.WORLD, tp_ep_pp=dist.group.WORLD)
    return total_norm(RANK_GRADS[owners][dist.get_rank()], groups, CPU, norm_type).item()


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
@pytest.mark.parametrize("owners", RANK_GRADS)
def test_every_rank_joins_the_norm_whatever_it_owns(pool, owners, norm_type, expected):
    assert pool.run(norm_over_two_ranks, owners, norm_type, world_size=2) == [expected, expected]


def norm_over_two_stages(stage_of_experts, norm_type):
    """A dense gradient of norm 3 and expert gradients of norm 4 on different stages; nothing is held elsewhere."""
    parallel_state.initialize_model_parallel(1, 2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    has_experts = groups.pp.rank() == stage_of_experts
    params = [parameter(1, 4.0, allreduce=False)] if has_experts else [parameter(1, 3.0)]
    return total_norm(grads_of(params, groups), groups, CPU, norm_type).item()


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
@pytest.mark.parametrize("stage", [0, 1])
def test_experts_on_one_stage_enter_the_norm_of_both(pool, stage, norm_type, expected):
    assert pool.run(norm_over_two_stages, stage, norm_type, world_size=2) == [expected, expected]
