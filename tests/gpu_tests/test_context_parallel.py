"""Attention in blocks of keys by the flash kernel: all context-parallel ranks in turn on one GPU, and at once."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.errors import ConfigError
from megatron.core.fusions.fused_block_attention import FlashKernel, PlainKernel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel import BlockAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils.zigzag import own_chunks, to_natural_order
from tests.common.small_models import normal, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

B, N, S, D = 2, 8, 1024, 128
SCALE = D**-0.5


class HeldExchange:
    """The pairs of all ranks in one process; gradients add up in `sums`, one entry for each owner."""

    def __init__(self, rank, pairs, sums):
        self.rank, self.pairs, self.sums = rank, pairs, sums

    def owners(self):
        return [(self.rank - step) % len(self.pairs) for step in range(len(self.pairs))]

    def rounds(self, pair):
        assert torch.equal(pair, self.pairs[self.rank])
        return ((owner, self.pairs[owner]) for owner in self.owners())

    def sum_at_owner(self, grads):
        for owner, grad in zip(self.owners(), grads, strict=True):
            self.sums[owner] += grad
        return self.sums[self.rank]


def inputs(num_groups, device, dtype):
    """Query, key, value and the gradient of the output, [b, heads, s, d]."""
    shapes = ((B, N, S, D), (B, num_groups, S, D), (B, num_groups, S, D), (B, N, S, D))
    return [normal(*shape, seed=seed).to(device, dtype) for seed, shape in enumerate(shapes)]


def at_once(query, key, value, grad):
    """Output and gradients of causal attention by torch."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE, enable_gqa=True)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def by_ranks(size, kernel, query, key, value, grad):
    """The same from all ranks in turn, joined."""
    parts = [[own_chunks(tensor, 2, rank, size) for tensor in (query, key, value, grad)] for rank in range(size)]
    pairs = [torch.stack((part[1], part[2])) for part in parts]
    sums = [torch.zeros_like(pair, dtype=torch.promote_types(pair.dtype, torch.float32)) for pair in pairs]
    outputs, query_grads = [], []
    for rank, part in enumerate(parts):
        way = BlockAttention(rank, size, HeldExchange(rank, pairs, sums), kernel, PlainKernel(SCALE))
        leaf = part[0].clone().requires_grad_()
        output = way.attend(leaf, part[1].clone().requires_grad_(), part[2], None, True)
        output.backward(part[3])
        outputs.append(output.detach())
        query_grads.append(leaf.grad)
    totals = torch.stack(sums)  # [P, 2, b, g, s, d]
    return [join(torch.stack(outputs)), join(torch.stack(query_grads)), join(totals[:, 0]), join(totals[:, 1])]


def join(parts):
    """[P, b, n, s, d] -> [b, n, S, d]."""
    return to_natural_order(parts.movedim(3, 1)).movedim(0, 2)


def errors(got, exact):
    """Largest differences relative to the largest element, for output and the three gradients."""
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)]


def compare(size, kernel, num_groups, device="cuda", dtype=torch.bfloat16):
    tensors = inputs(num_groups, device, dtype)
    exact = at_once(*(tensor.double() for tensor in tensors))
    whole, split = errors(at_once(*tensors), exact), errors(by_ranks(size, kernel, *tensors), exact)
    print(f"{kernel} P={size} g={num_groups}: errors at once {whole}, by ranks {split}")
    for name, at_once_error, error in zip("oqkv", whole, split, strict=True):
        assert error <= 2 * at_once_error + 2**-9, name


@pytest.mark.parametrize("num_groups", [N, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_flash_blocks_are_as_exact_as_attention_at_once(size, num_groups):
    compare(size, FlashKernel(SCALE), num_groups)


def test_plain_blocks_are_as_exact_as_attention_at_once():
    compare(2, PlainKernel(SCALE), 2)


def test_flash_blocks_repeat_bit_for_bit_in_deterministic_mode():
    tensors = inputs(2, "cuda", torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (by_ranks(4, FlashKernel(SCALE), *tensors) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def group_of_two():
    """A group of two ranks whose other member never comes; layers that are only built do not mind."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def build(group, **fields):
    config = small_config(device="cuda", context_parallel_size=2, **fields)
    return DotProductAttention(config, 1, pg_collection=ProcessGroupCollection(cp=group)).over_ranks


def test_half_precision_takes_the_flash_kernel_and_fp32_the_plain_one(group_of_two):
    assert isinstance(build(group_of_two, bf16=True).kernel, FlashKernel)
    assert isinstance(build(group_of_two, bf16=True, attention_backend="unfused").kernel, PlainKernel)
    assert isinstance(build(group_of_two).kernel, PlainKernel)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attention_backend": "fused"}, "attention_backend='fused' with context_parallel_size=2"),
        ({"kv_channels": 12}, "kv_channels=12 with context_parallel_size=2"),
    ],
    ids=["cudnn", "odd_heads"],
)
def test_kernel_that_tells_no_log_sum_exp_is_refused(group_of_two, fields, text):
    with pytest.raises(ConfigError, match=text):
        build(group_of_two, bf16=True, **fields)
