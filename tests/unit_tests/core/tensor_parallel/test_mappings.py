"""Every step between regions, and the layers made of them, on two ranks against one."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.param_attrs import InitSpec
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.common.small_models import normal, small_config

INIT = InitSpec("normal", 1.0)
# name -> (output of ranks with inputs x0 and x1, gradient of x0 and x1 for output gradients g0 and g1)
STEPS = {
    "copy_to_tensor_model_parallel_region": (
        lambda x: x,
        lambda g: [g[0] + g[1]] * 2,
    ),
    "reduce_from_tensor_model_parallel_region": (
        lambda x: [x[0] + x[1]] * 2,
        lambda g: g,
    ),
    "scatter_to_tensor_model_parallel_region": (
        lambda x: [x[0][..., :2], x[1][..., 2:]],
        lambda g: [torch.cat(g, -1)] * 2,
    ),
    "gather_from_tensor_model_parallel_region": (
        lambda x: [torch.cat(x, -1)] * 2,
        lambda g: [g[0][..., :4], g[1][..., 4:]],
    ),
    "scatter_to_sequence_parallel_region": (
        lambda x: [x[0][:3], x[1][3:]],
        lambda g: [torch.cat(g)] * 2,
    ),
    "gather_from_sequence_parallel_region": (
        lambda x: [torch.cat(x)] * 2,
        lambda g: [(g[0] + g[1])[:6], (g[0] + g[1])[6:]],
    ),
    "reduce_scatter_to_sequence_parallel_region": (
        lambda x: [(x[0] + x[1])[:3], (x[0] + x[1])[3:]],
        lambda g: [torch.cat(g)] * 2,
    ),
}


def run_mapping(name):
    x = normal(6, 2, 4, seed=dist.get_rank()).requires_grad_()
    out = getattr(mappings, name)(x, dist.group.WORLD)
    grad = normal(*out.shape, seed=7 + dist.get_rank())
    out.backward(grad)
    return out.detach(), grad, x.grad


@pytest.mark.parametrize("name", STEPS)
def test_step_and_its_gradient(pool, name):
    ranks = pool.run(run_mapping, name)
    forward, backward = STEPS[name]
    outputs = forward([normal(6, 2, 4, seed=rank) for rank in (0, 1)])
    grads = backward([rank[1] for rank in ranks])
    for rank, (out, _, grad) in enumerate(ranks):
        torch.testing.assert_close(out, outputs[rank])
        torch.testing.assert_close(grad, grads[rank])


@pytest.mark.parametrize("name", STEPS)
def test_group_of_one_returns_its_input(name):
    x = normal(6, 2, 4)
    assert getattr(mappings, name)(x, None) is x


def run_pair(is_sequence_parallel, is_split, gather):
    """Column then row parallel, or column alone with gathered output: output, gradients of input, weight and bias."""
    group = dist.group.WORLD if is_split else None
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": is_sequence_parallel} if is_split else {}
    config = small_config(**sizes)
    first = ColumnParallelLinear(6, 8, config=config, init_method=INIT, gather_output=gather, tp_group=group)
    second = RowParallelLinear(
        8, 4, config=config, init_method=INIT, bias=True, input_is_parallel=not gather, skip_bias_add=False,
        tp_group=group,
    )  # fmt: skip
    shard = is_split and is_sequence_parallel
    x = mappings.own_rows(normal(4, 2, 6, seed=1), group if shard else None).requires_grad_()
    y, _ = first(x)
    output, _ = second(torch.tanh(y))
    output.backward(mappings.own_rows(normal(4, 2, 4, seed=2), group if shard else None))
    return output.detach(), x.grad, first.weight.grad, first.bias.grad, second.weight.grad


@pytest.mark.parametrize(
    ("is_sequence_parallel", "gather"),
    [(False, False), (True, False), (False, True)],
    ids=["split_between", "sequence_parallel", "gathered_between"],
)
def test_linear_layers_on_two_ranks_equal_one(pool, is_sequence_parallel, gather):
    ((output, grad, first, bias, second),) = pool.run(run_pair, False, False, False, world_size=1)
    ranks = pool.run(run_pair, is_sequence_parallel, True, gather)
    for part, whole in ((0, output), (1, grad)):
        got = torch.cat([rank[part] for rank in ranks]) if is_sequence_parallel else ranks[1][part]
        torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), first, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]), bias, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[4] for rank in ranks], 1), second, rtol=1e-12, atol=1e-12)


def saved_storage_sizes():
    """Elements that a sequence-parallel column layer keeps for backward, but for its weight."""
    config = small_config(tensor_model_parallel_size=2, sequence_parallel=True)
    layer = ColumnParallelLinear(6, 8, config=config, init_method=INIT, bias=False, tp_group=dist.group.WORLD)
    sizes = []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(normal(2, 3, 6).requires_grad_())
    return sizes


def test_sequence_parallel_layer_keeps_its_shard_only(pool):
    assert pool.run(saved_storage_sizes) == [[2 * 3 * 6, 4 * 6]] * 2


def run_embedding(is_split, scatter, deterministic):
    group = dist.group.WORLD if is_split else None
    config = small_config(deterministic_mode=deterministic)
    table = VocabParallelEmbedding(
        8, 4, init_method=INIT, config=config, reduce_scatter_embeddings=scatter, tp_group=group
    )
    out = table(torch.tensor([[1, 1, 7, 4], [0, 5, 3, 3]]))
    (out * normal(4, 1, 1, seed=3)[: out.shape[0]]).sum().backward()
    return out.detach(), table.weight.grad


@pytest.mark.parametrize("deterministic", [False, True])
def test_split_table_looks_up_what_the_whole_one_does(pool, deterministic):
    ((whole, grad),) = pool.run(run_embedding, False, False, deterministic, world_size=1)
    ranks = pool.run(run_embedding, True, False, deterministic)
    assert all(torch.equal(out, whole) for out, _ in ranks)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), grad)
    shards = pool.run(run_embedding, True, True, deterministic)
    assert torch.equal(torch.cat([out for out, _ in shards]), whole.transpose(0, 1))


LABELS = torch.tensor([[0, 3], [6, 2], [1, 4]])


def run_cross_entropy(num_rows, num_real):
    """Losses, and the gradient of this rank's columns; logits are drawn for 7 real rows."""
    logits = torch.full((3, 2, num_rows), 50.0, dtype=torch.float64)
    logits[..., :num_real] = normal(3, 2, 7)[..., :num_real] * 5
    size = dist.get_world_size()
    own = logits.chunk(size, -1)[dist.get_rank()].clone().requires_grad_()
    group = dist.group.WORLD if size > 1 else None
    losses = vocab_parallel_cross_entropy(own, LABELS, tp_group=group, true_vocab_size=num_real)
    losses.backward(normal(3, 2, seed=5))
    return losses.detach(), own.grad


@pytest.mark.parametrize("num_rows", [8, 16, 20], ids=["one_filler", "rank_of_filler", "more_filler"])
def test_loss_over_a_split_vocabulary_equals_the_whole_one(pool, num_rows):
    ((expected, grad),) = pool.run(run_cross_entropy, 7, 7, world_size=1)
    ranks = pool.run(run_cross_entropy, num_rows, 7)
    assert torch.equal(ranks[0][0], ranks[1][0])
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-12, atol=1e-12)
    got = torch.cat([rank[1] for rank in ranks], -1)
    torch.testing.assert_close(got[..., :7], grad, rtol=1e-12, atol=1e-12)
    assert torch.count_nonzero(got[..., 7:]) == 0
