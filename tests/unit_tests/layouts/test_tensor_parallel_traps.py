"""Faults that trees of this kind have had with layers, sequences and experts split over tensor-parallel ranks."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.aux_loss_scale import set_aux_loss_scale
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.module_api.global_names import named_global_parameters
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import params_norm
from megatron.core.param_attrs import param_attrs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import own_rows
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MoEMetrics
from megatron.core.transformer.moe.router import TopKRouter
from tests.common.layouts import Layout, run_step
from tests.common.moe_layers import moe_config, normal
from tests.common.reference import assert_matches, make_weights
from tests.common.reference_model import parameter_shapes
from tests.common.small_models import small_config
from tests.unit_tests.layouts.cases import SEQ_LENGTH, make_batch, make_case
from tests.unit_tests.layouts.test_tensor_parallel_sweep import EXPERTS, SHAPE, moe


def start_layout(layout):
    """Groups of a layout, and the sizes that a configuration must name."""
    parallel_state.initialize_model_parallel(
        layout.tp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp
    )
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.is_sequence_parallel,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


# Norm, zero count and parameter norm count each element once.

FOUR_RANKS = [
    moe(dp=2, ep=2, etp=2),
    moe(dp=2, ep=2, etp=1),
    moe(dp=2, ep=4, etp=1),
]


def norms_of_known_values(layout, zero_expert):
    """Every dense gradient element 0.5, every expert gradient element 0.25, every weight 1."""
    start_layout(layout)
    config = make_case(SHAPE, **EXPERTS).config(layout)
    model = GPTModel(config, get_gpt_decoder_block_spec(config), 16, SEQ_LENGTH, position_embedding_type="rope")
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    chunk.zero_grad_buffer()
    for name, param in named_global_parameters(chunk):
        is_zero = zero_expert is not None and name.endswith(f"experts.linear_fc1.weight{zero_expert}")
        param.main_grad.fill_(0.0 if is_zero else 0.25 if ".mlp.experts." in name else 0.5)
        param.data.fill_(1.0)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    norm_of_weights = params_norm(model.parameters(), groups, torch.device("cpu"))
    settings = OptimizerConfig(optimizer="sgd", lr=0.0, weight_decay=0.0, clip_grad=0.0, log_num_zeros_in_grad=True)
    _, norm, num_zeros = get_megatron_optimizer(settings, [chunk]).step()
    return norm, num_zeros, float(norm_of_weights)


@pytest.mark.parametrize("layout", FOUR_RANKS, ids=str)
def test_norms_and_zero_count_are_those_of_the_unsharded_model(pool, layout):
    case = make_case(SHAPE, **EXPERTS)
    sizes = {n: torch.Size(s).numel() for n, s in parameter_shapes(case.config(Layout()), SHAPE).items()}
    num_expert = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    num_dense = sum(sizes.values()) - num_expert
    expected = (0.25 * num_dense + 0.0625 * num_expert) ** 0.5
    for norm, num_zeros, norm_of_weights in pool.run(norms_of_known_values, layout, None, world_size=4):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert norm_of_weights == pytest.approx((num_dense + num_expert) ** 0.5, rel=1e-12)
        assert num_zeros == 0
    num_zeroed = sizes["decoder.layers.1.mlp.experts.linear_fc1.weight1"]
    assert {rank[1] for rank in pool.run(norms_of_known_values, layout, 1, world_size=4)} == {num_zeroed}


# Replicated parameters stay equal on all tensor-parallel ranks.


@pytest.mark.parametrize(("layout", "on_input"), [(moe(etp=1), False), (moe(ep=2, etp=1), True)], ids=str)
def test_three_steps_leave_equal_replicas_and_the_weights_of_one_rank(pool, layout, on_input):
    before = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
    case = make_case(SHAPE, **EXPERTS, qk_layernorm=True, **(before if on_input else {}))
    batch, weights = make_batch(2), make_weights(case.config(Layout()), case.shape, seed=3)
    options = {"steps": 3, "clip_grad": 0.5, "learning_rate": 0.3}
    # joining the ranks asserts that gradients and weights of replicas are bitwise equal
    one, two = (run_step(pool, case, layout, batch, weights, **options) for layout in (Layout(), layout))
    assert_matches(one, two)
    one.grads, two.grads = one.params, two.params
    assert_matches(one, two)


# Biases enter once.


def rows_of_biased_experts(layout):
    """Routed experts whose weights are 0 and whose output biases are 1."""
    sizes = start_layout(layout)
    config = moe_config(**sizes, add_bias_linear=True, moe_token_dispatcher_type=layout.dispatcher)
    layer = MoELayer(config, layer_number=1)
    for name, param in layer.experts.named_parameters():
        param.data.fill_(1.0 if "linear_fc2.bias" in name else 0.0)
    return layer(normal(3, 2, 16))[0].detach()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_output_bias_of_an_expert_is_added_once(pool, dispatcher):
    for ep in (1, 2):
        for output in pool.run(rows_of_biased_experts, moe(ep=ep, etp=1, dispatcher=dispatcher)):
            torch.testing.assert_close(output, torch.ones(3, 2, 16, dtype=torch.float64))


# The strength of auxiliary losses does not depend on the layout.

KINDS = {
    "aux": {"moe_aux_loss_coeff": 0.5},
    "seq_aux": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    "global_aux": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5},
    "z": {"moe_z_loss_coeff": 0.3},
}


def router_gradient(layout, kind, is_per_token):
    """64 tokens, 16 positions of 4 samples, through a router alone."""
    sizes = start_layout(layout)
    config = moe_config(**sizes, **KINDS[kind], calculate_per_token_loss=is_per_token, num_attention_heads=4)
    router = TopKRouter(config, layer_number=1)
    router.weight.data.copy_(normal(4, 16, seed=1))
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), router)
    group = ProcessGroupCollection.use_mpu_process_groups().tp
    chunk.zero_grad_buffer()
    set_aux_loss_scale(1.0)
    probs, _ = chunk(own_rows(normal(16, 4, 16, seed=2), group))
    objective = (probs * own_rows(normal(16, 4 * 4, seed=3), group).view_as(probs)).sum()
    (objective if is_per_token else objective / 64).backward()
    finalize_model_grads([chunk], torch.tensor(64) if is_per_token else None)
    return router.weight.main_grad.clone()


@pytest.mark.parametrize("is_per_token", [False, True], ids=["mean_of_means", "per_token"])
@pytest.mark.parametrize("kind", KINDS)
def test_router_gradient_does_not_depend_on_the_shards_of_the_sequence(pool, kind, is_per_token):
    (expected,) = pool.run(router_gradient, Layout(), kind, is_per_token, world_size=1)
    for tp in (2, 4):
        for grad in pool.run(router_gradient, moe(tp=tp, etp=1), kind, is_per_token, world_size=tp):
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


# Padding.


def padded_step(layout, length):
    """4 real positions of 2 samples in a sequence of `length`: router gradient, counts and logged values."""
    sizes = start_layout(layout)
    losses = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.5, 0.4]}
    config = moe_config(**sizes, **losses, moe_z_loss_coeff=0.3)
    layer = MoELayer(config, layer_number=1)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    group = ProcessGroupCollection.use_mpu_process_groups().tp
    hidden = own_rows(normal(8, 2, 16, seed=2)[:length], group)
    mask = (torch.arange(length) >= 4).expand(2, length)
    chunk.zero_grad_buffer()
    set_aux_loss_scale(1.0)
    output, _ = chunk(hidden, padding_mask=mask)
    (output**2 * own_rows(~mask.t(), group).unsqueeze(-1)).sum().backward()
    counts = []
    update = layer.router.apply_step_counts
    layer.router.apply_step_counts = lambda summed: (counts.append(summed.tolist()), update(summed))
    finalize_model_grads([chunk])
    logged = MoEMetrics([chunk]).reduce_and_reset(1)
    return layer.router.weight.main_grad.clone(), counts, logged


@pytest.mark.parametrize("layout", [Layout(), moe(etp=1)], ids=str)
def test_padded_batch_routes_as_the_cropped_one(pool, layout):
    ((grad, counts, logged),) = pool.run(padded_step, Layout(), 4, world_size=1)
    for got_grad, got_counts, got_logged in pool.run(padded_step, layout, 8, world_size=layout.world_size):
        torch.testing.assert_close(got_grad, grad, rtol=1e-9, atol=1e-12)
        assert got_counts == counts
        assert got_logged == pytest.approx(logged, rel=1e-6)


# Filler rows of the vocabulary.


def step_of_padded_vocabulary(tp, padded_size):
    """13 tokens in a table of `padded_size` rows: losses, and the gradients of this rank with their place."""
    start_layout(Layout(tp=tp, is_sequence_parallel=tp > 1))
    config = small_config(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        vocab_size=padded_size,
        max_sequence_length=8,
        true_vocab_size=13,
        position_embedding_type="rope",
    )
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    tokens = torch.arange(16).view(2, 8) * 5 % 13
    chunk.zero_grad_buffer()
    losses = chunk(tokens, None, None, labels=(tokens + 1) % 13)
    losses.mean().backward()
    finalize_model_grads([chunk])
    weights = ("embedding.word_embeddings.weight", "output_layer.weight")
    rows = {n: p.main_grad.clone() for n, p in named_global_parameters(chunk) if n in weights}
    norms = {n: p.main_grad.clone() for n, p in named_global_parameters(chunk) if "layernorm" in n}
    return losses.detach(), rows, norms


@pytest.mark.parametrize("padded_size", [14, 28], ids=["one_filler_row", "rank_of_filler_rows"])
def test_loss_and_gradients_do_not_depend_on_filler_rows(pool, padded_size):
    ((losses, rows, norms),) = pool.run(step_of_padded_vocabulary, 1, 13, world_size=1)
    ranks = pool.run(step_of_padded_vocabulary, 2, padded_size)
    for got_losses, _, got_norms in ranks:
        torch.testing.assert_close(got_losses, losses, rtol=1e-9, atol=0)
        for name, grad in norms.items():
            torch.testing.assert_close(got_norms[name], grad, rtol=1e-9, atol=1e-12, msg=name)
    for name, grad in rows.items():
        got = torch.cat([rank[1][name] for rank in ranks])
        torch.testing.assert_close(got[:13], grad, rtol=1e-9, atol=1e-12, msg=name)
        assert torch.count_nonzero(got[13:]) == 0


# Random numbers.


def dropped(is_sequence_parallel):
    """Which elements of the embedding's output are dropped on this rank, shard by shard of the sequence."""
    start_layout(Layout(tp=2))
    model_parallel_cuda_manual_seed(7, device="cpu")
    config = small_config(tensor_model_parallel_size=2, sequence_parallel=is_sequence_parallel, hidden_dropout=0.5)
    model = GPTModel(config, get_gpt_decoder_block_spec(config), vocab_size=32, max_sequence_length=8)
    out = model.embedding(torch.arange(8).view(1, 8), torch.arange(8).view(1, 8))
    return (out == 0).flatten()


def test_dropout_differs_between_sequence_shards_and_is_equal_on_whole_sequences(pool):
    first, second = pool.run(dropped, False)
    assert torch.equal(first, second)
    first, second = pool.run(dropped, True)
    assert 0.3 < float((first ^ second).double().mean()) < 0.7


# Initial weights.


def initial_shards(layout, is_grouped):
    """{global name: (shard, whole shape, attributes)} of this rank."""
    start_layout(layout)
    config = make_case(SHAPE, **EXPERTS).config(layout)
    config.moe_grouped_gemm = is_grouped
    model = GPTModel(config, get_gpt_decoder_block_spec(config), vocab_size=16, max_sequence_length=SEQ_LENGTH)
    cut = {}
    for name, param in named_global_parameters(model):
        attrs = param_attrs(param)
        cut[name] = (param.detach().clone(), attrs.partition_dim, attrs.num_parts, attrs.partition_rank)
    return cut


@pytest.mark.parametrize("is_grouped", [False, True], ids=["sequential", "grouped"])
def test_initial_weights_are_slices_of_those_of_one_rank(pool, is_grouped):
    (whole,) = pool.run(initial_shards, Layout(), is_grouped, world_size=1)
    for shards in pool.run(initial_shards, moe(dp=2, ep=2, etp=2), is_grouped, world_size=4):
        for name, (shard, dim, num_parts, rank) in shards.items():
            full = whole[name][0]
            if dim is not None:
                pieces = [part.chunk(2, dim)[rank] for part in full.chunk(num_parts, dim)]
                full = torch.cat(pieces, dim)
            assert torch.equal(shard, full), name
