"""Core attention spread over context-parallel ranks against one rank with the whole sequence."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import context_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils.collectives import last_collective
from megatron.core.utils.zigzag import own_chunks, to_natural_order
from tests.common.mutants import replaced
from tests.common.small_models import normal, small_config

S, B, N, G, D = 16, 2, 4, 4, 8
COMM_TYPES = ("p2p", "all_gather", "a2a")
DOCUMENTS = torch.zeros(B, 1, S, S, dtype=torch.bool)
DOCUMENTS[0, :, 5:, :5] = True
DOCUMENTS[1, :, 11:, :11] = True
PADDING = torch.zeros(B, 1, 1, S, dtype=torch.bool)
PADDING[1, :, :, 9:] = True
CASES = {
    "causal": (AttnMaskType.causal, None),
    "causal_documents": (AttnMaskType.causal, DOCUMENTS),
    "everything": (AttnMaskType.arbitrary, None),
    "padding": (AttnMaskType.arbitrary, PADDING),
}


def inputs(groups=G):
    """Query, key, value and the gradient of the output, whole."""
    shapes = ((S, B, N, D), (S, B, groups, D), (S, B, groups, D), (S, B, N * D))
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def build(comm_type="p2p", mask_type=AttnMaskType.causal, group=None, groups=G, **fields):
    size = 1 if group is None else group.size()
    config = small_config(num_query_groups=groups, context_parallel_size=size, cp_comm_type=comm_type, **fields)
    return DotProductAttention(config, 2, mask_type, pg_collection=ProcessGroupCollection(cp=group))


def attend(attention, tensors, mask):
    """Output and the gradients of query, key and value."""
    *heads, grad = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in heads]
    output = attention(*leaves, mask)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def attend_over_ranks(cases, groups, fields):
    """What this rank gets for its part of the sequence, for each (comm_type, case)."""
    world = dist.group.WORLD
    parts = [own_chunks(tensor, 0, world.rank(), world.size()) for tensor in inputs(groups)]
    results = {}
    for comm_type, case in cases:
        mask_type, mask = CASES[case]
        if mask is not None and mask.shape[2] > 1:
            mask = own_chunks(mask, 2, world.rank(), world.size())
        results[comm_type, case] = attend(build(comm_type, mask_type, world, groups, **fields), parts, mask)
    return results


def join(ranks):
    """{case: whole tensors} from every rank's parts."""
    return {
        case: [to_natural_order(torch.stack(parts)) for parts in zip(*(rank[case] for rank in ranks), strict=True)]
        for case in ranks[0]
    }


@pytest.mark.parametrize(
    ("world_size", "groups", "fields"),
    [(2, G, {}), (4, G, {}), (2, 2, {"apply_query_key_layer_scaling": True}), (2, 2, {"attention_backend": "local"})],
    ids=["cp2", "cp4", "layer_scaling", "plain"],
)
def test_output_and_gradients_equal_those_of_one_rank(pool, world_size, groups, fields):
    cases = [*itertools.product(COMM_TYPES, CASES)]
    got = join(pool.run(attend_over_ranks, cases, groups, fields, world_size=world_size))
    for comm_type, case in cases:
        mask_type, mask = CASES[case]
        expected = attend(build(mask_type=mask_type, groups=groups, **fields), inputs(groups), mask)
        for name, value, wanted in zip("oqkv", got[comm_type, case], expected, strict=True):
            assert torch.allclose(value, wanted, rtol=1e-10, atol=1e-12), (comm_type, case, name)


def test_ring_and_gather_give_the_same_bits(pool):
    got = join(pool.run(attend_over_ranks, [(name, "causal") for name in COMM_TYPES[:2]], G, {}, world_size=4))
    ring, gathered = got["p2p", "causal"], got["all_gather", "causal"]
    assert torch.equal(ring[0], gathered[0])
    assert torch.equal(ring[1], gathered[1])


def value_gradients_in_bf16(upcast):
    """Gradients of this rank's values in bf16, for each way that adds up shares; `upcast` may be a fault."""
    world = dist.group.WORLD
    parts = [own_chunks(tensor, 0, world.rank(), world.size()).bfloat16() for tensor in inputs()]
    with replaced(context_parallel, "upcast", upcast):
        attentions = [build(name, group=world, bf16=True) for name in COMM_TYPES[:2]]
        return [attend(attention, parts, None)[3] for attention in attentions]


def unchanged(tensor):
    return tensor


@pytest.mark.parametrize("is_mutant", [False, True], ids=["summed_in_fp32", "summed_in_bf16"])
def test_gradients_of_values_in_bf16_are_rounded_once(pool, is_mutant):
    ranks = pool.run(value_gradients_in_bf16, unchanged if is_mutant else context_parallel.upcast, world_size=4)
    whole = [to_natural_order(torch.stack(parts)).double() for parts in zip(*ranks, strict=True)]
    exact = attend(build(), [tensor.bfloat16().double() for tensor in inputs()], None)[3]
    # half a unit in the last of 8 bits; the rest is for fp32, in which each term is rounded
    bound = exact.abs() * 2.0**-8 + 1e-5
    for got in whole:
        assert bool(((got - exact).abs() <= bound).all()) is not is_mutant


@dataclasses.dataclass(frozen=True)
class Spy:
    """A kernel that notes how many collectives had begun when a block was computed."""

    kernel: object
    seen: list

    def forward(self, *args):
        self.seen.append(last_collective.count)
        return self.kernel.forward(*args)

    def backward(self, *args):
        self.seen.append(last_collective.count)
        return self.kernel.backward(*args)


def collectives_begun_before_each_block():
    world = dist.group.WORLD
    attention, seen = build("p2p", group=world), []
    attention.over_ranks = dataclasses.replace(attention.over_ranks, kernel=Spy(attention.over_ranks.kernel, seen))
    start = last_collective.count
    attend(attention, [own_chunks(tensor, 0, world.rank(), 4) for tensor in inputs()], None)
    return [count - start for count in seen]


def test_next_keys_are_on_their_way_while_a_block_is_computed(pool):
    for seen in pool.run(collectives_begun_before_each_block, world_size=4):
        # forward: 3 shifts for 4 blocks. Backward: again, and after each block its gradients leave.
        assert seen == [1, 2, 3, 3, 4, 6, 8, 9]


def kept_for_backward(comm_type):
    world, sizes = dist.group.WORLD, []

    def note(tensor):
        sizes.append(tensor.numel())
        return tensor

    heads = [own_chunks(tensor, 0, world.rank(), 4).requires_grad_() for tensor in inputs()[:3]]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        build(comm_type, group=world)(*heads)
    return sizes


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_keys_of_other_ranks_are_not_kept_for_backward(pool, comm_type):
    own = S // 4 * B * N * D
    for sizes in pool.run(kept_for_backward, comm_type, world_size=4):
        assert sorted(sizes) == sorted([own, 2 * own, own, own // D])


def comm_types_of_layers():
    group = dist.group.WORLD
    config = small_config(context_parallel_size=2, cp_comm_type=["allgather", "a2a"])
    groups = ProcessGroupCollection(cp=group)
    layers = [DotProductAttention(config, number, pg_collection=groups).over_ranks for number in (1, 2)]
    return [type(layers[0].exchange).__name__, type(layers[1]).__name__]


def test_each_layer_has_its_own_algorithm(pool):
    assert pool.run(comm_types_of_layers) == [["GatherExchange", "HeadExchange"]] * 2
