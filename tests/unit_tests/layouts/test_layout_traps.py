"""Faults that trees of this kind have had, at the level of a layer or an optimizer on two ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_grouped_linear import grouped_linear
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.collective_log import CollectiveLog, compare_logs
from tests.common.forced_router import all_to_rank, forced_routing
from tests.common.poison import assert_finite, fresh_memory_poison
from tests.unit_tests.layouts.cases import BASE, EP2, make_case

# Clipping by the norm of the whole model.


def clip_known_norms():
    """Dense gradient norm 4, expert gradient norms 3 on rank 0 and 12 on rank 1: 13 in all; clip at 1.3."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    case = make_case()
    config = case.config(EP2)
    model = GPTModel(config, get_gpt_decoder_block_spec(config), vocab_size=13, max_sequence_length=6)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    chunk.zero_grad_buffer()
    kinds = {True: [], False: []}
    for _, param in named_global_parameters(chunk):
        kinds[getattr(param, "allreduce", True)].append(param)
    kinds[True][0].main_grad[0, 0] = 4.0
    kinds[False][0].main_grad[0, 0] = 3.0 if dist.get_rank() == 0 else 12.0
    settings = OptimizerConfig(optimizer="sgd", lr=0.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=1.3)
    _, norm, _ = get_megatron_optimizer(settings, [chunk]).step()
    return norm, kinds[True][0].main_grad[0, 0].item(), kinds[False][0].main_grad[0, 0].item()


def test_both_ranks_clip_by_the_norm_of_the_whole_model(pool):
    (norm0, dense0, expert0), (norm1, dense1, expert1) = pool.run(clip_known_norms)
    assert norm0 == norm1 == 13.0
    assert dense0 == dense1 == pytest.approx(0.4, rel=1e-6)
    assert (expert0, expert1) == pytest.approx((0.3, 1.2), rel=1e-6)


# Groups without rows.


@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_group_without_rows_gets_a_zero_weight_gradient(counts, dtype):
    generator = torch.Generator().manual_seed(11)
    rows = torch.randn(sum(counts), 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weights = [torch.randn(6, 8, generator=generator).to(dtype).requires_grad_() for _ in counts]
    with fresh_memory_poison():
        out = grouped_linear(rows, weights, torch.tensor(counts))
        out.sum().backward()
    assert_finite("out", out)
    start = 0
    for count, weight in zip(counts, weights, strict=True):
        expected = torch.ones(count, 6, dtype=dtype).t() @ rows.detach()[start : start + count]
        assert torch.equal(weight.grad, expected), count
        start += count
    assert_finite("rows.grad", rows.grad)


@pytest.mark.parametrize("counts", [[5, 0, 3, 0], [0, 0, 0, 0]], ids=str)
def test_group_without_rows_leaves_an_accumulated_gradient_as_it_is(counts):
    generator = torch.Generator().manual_seed(12)
    rows = torch.randn(sum(counts), 8, generator=generator, requires_grad=True)
    weights = [torch.randn(6, 8, generator=generator).requires_grad_() for _ in counts]
    before = [torch.randn(6, 8, generator=generator) for _ in counts]
    for weight, old in zip(weights, before, strict=True):
        weight.grad = old.clone()
    with fresh_memory_poison():
        grouped_linear(rows, weights, torch.tensor(counts)).sum().backward()
    for count, weight, old in zip(counts, weights, before, strict=True):
        assert torch.equal(weight.grad, old) == (count == 0)
        assert_finite("grad", weight.grad)


# Ranks without rows or without tokens.


def layer_step(dispatcher, is_grouped, token_counts, plan):
    """Forward, backward and reduction of one layer; rank r brings token_counts[r] tokens."""
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    dtype = torch.float32 if is_grouped else torch.float64
    config = TransformerConfig(
        **BASE | {"num_layers": 1, "moe_layer_freq": 1},
        device="cpu",
        params_dtype=dtype,
        expert_model_parallel_size=world,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=is_grouped,
        moe_shared_expert_intermediate_size=4,
    )
    layer = MoELayer(config, layer_number=1)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), layer)
    offset, count = sum(token_counts[: dist.get_rank()]), token_counts[dist.get_rank()]
    generator = torch.Generator().manual_seed(13)
    tokens = torch.randn(sum(token_counts), 1, 8, generator=generator, dtype=torch.float64)
    hidden = tokens[offset : offset + count].to(dtype).requires_grad_()
    chunk.zero_grad_buffer()
    with fresh_memory_poison(), forced_routing(layer, plan) as forced, CollectiveLog() as log:
        forced.token_ids = torch.arange(offset, offset + count)
        output, _ = chunk(hidden)
        (output**2).sum().backward()
        finalize_model_grads([chunk])
    grads = {name: param.main_grad.clone() for name, param in named_global_parameters(chunk)}
    return output.detach(), hidden.grad, grads, log.records


def check_layer(pool, dispatcher, is_grouped, token_counts, busy_rank):
    """Two ranks against one: outputs, gradients of the input and of every parameter, equal collectives."""
    plan = all_to_rank(busy_rank, 2, 4, 2)
    ranks = pool.run(layer_step, dispatcher, is_grouped, token_counts, plan)
    whole = pool.run(layer_step, "alltoall", is_grouped, (sum(token_counts),), plan, world_size=1)
    expected, expected_hidden, expected_grads, _ = whole[0]
    bound = 1e-5 if is_grouped else 1e-9
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), expected_hidden, rtol=bound, atol=bound)
    assert compare_logs([rank[3] for rank in ranks]) == []
    seen = {}
    for _, _, grads, _ in ranks:
        for name, grad in grads.items():
            assert_finite(name, grad)
            assert torch.equal(seen.setdefault(name, grad), grad), name
    assert sorted(seen) == sorted(expected_grads)
    for name, grad in seen.items():  # two ranks average over data parallel ranks, one rank does not
        torch.testing.assert_close(grad * 2, expected_grads[name], rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize(("token_counts", "busy_rank"), [((5, 0), 0), ((5, 0), 1), ((3, 5), 1)], ids=str)
def test_rank_without_rows_or_tokens_takes_part(pool, dispatcher, token_counts, busy_rank):
    check_layer(pool, dispatcher, False, token_counts, busy_rank)


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["sequential", "grouped"])
@pytest.mark.parametrize("token_counts", [(5, 5), (5, 0), (0, 4), (3, 5), (0, 0)], ids=str)
@pytest.mark.parametrize("busy_rank", [0, 1])
def test_every_distribution_of_tokens_over_two_ranks(pool, dispatcher, is_grouped, token_counts, busy_rank):
    check_layer(pool, dispatcher, is_grouped, token_counts, busy_rank)


# Precision of the probabilities.


def dtypes_of_probabilities(dispatcher):
    """bf16 layer with an fp32 router: dtypes of probabilities on their way, and the output for equal input."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        **BASE | {"num_layers": 1, "moe_layer_freq": 1},
        device="cpu",
        bf16=True,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type=dispatcher,
        moe_router_dtype="fp32",
    )
    layer = MoELayer(config, layer_number=1)
    hidden = torch.randn(16, 1, 8, generator=torch.Generator().manual_seed(14)).bfloat16().requires_grad_()
    rows, probs, shared, state = layer.route_and_preprocess(hidden)
    probs.retain_grad()
    dtypes = {"preprocess": probs.dtype}
    rows, sent = layer.dispatch(rows, probs, state)
    dtypes["dispatch"] = sent.dtype
    seen = []
    hook = layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[2].dtype))
    rows = layer.experts_compute(rows, sent, state)
    hook.remove()
    dtypes["experts"] = seen[0]
    output = layer.postprocess(layer.combine(rows, state), shared, state)
    output.float().square().sum().backward()
    dtypes["gradient"] = probs.grad.dtype
    return output.detach(), dtypes


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_probabilities_keep_fp32_and_both_ranks_agree_bitwise(pool, dispatcher):
    (output0, dtypes), (output1, _) = pool.run(dtypes_of_probabilities, dispatcher)
    assert dtypes == dict.fromkeys(("preprocess", "dispatch", "experts", "gradient"), torch.float32)
    assert torch.equal(output0, output1)
