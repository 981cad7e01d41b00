"""The comparison with the reference notices faults of sequences spread over context-parallel ranks."""

from contextlib import nullcontext

import pytest
import torch

from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.pipeline_parallel import step
from megatron.core.transformer import context_parallel
from megatron.core.transformer.context_parallel import _Block
from megatron.core.transformer.moe import load_balance
from tests.common.layouts import Layout, join_ranks, step_job
from tests.common.mutants import deleted_call, replaced
from tests.common.pool import RankErrors
from tests.common.reference import assert_matches, make_weights, reference_step
from tests.unit_tests.layouts.cases import make_case, masked_batch
from tests.unit_tests.layouts.grid import EXPERTS, SEQ_LENGTH, SHAPE, UNEVEN, split

CASE = make_case(SHAPE, **EXPERTS)


def one_half(tensor, dim, rank, size):
    """Ranks hold halves instead of an early and a late chunk."""
    return tensor.chunk(size, dim)[rank]


class EarlierKeysOnly(_Block):
    """Late queries do not look at keys of later ranks."""

    @classmethod
    def of(cls, owner, rank, length, is_causal):
        block = _Block.of(owner, rank, length, is_causal)
        return _Block(slice(length, length), block.keys, False) if owner > rank else block


class AllOwnKeys(_Block):
    """Queries look at later keys of their own rank."""

    @classmethod
    def of(cls, owner, rank, length, is_causal):
        block = _Block.of(owner, rank, length, is_causal)
        return _Block(block.queries, block.keys, False)


def own_share_only(exchange, grads):
    """Gradients of keys and values from other ranks are lost."""
    return next(torch.clone(grad) for grad in [*grads][:1])


def local(tensor, group):
    """A sum that stays on its rank."""
    return tensor


DIFFERS = r"differ"
MUTANTS = {
    "none": (nullcontext, ""),
    "angles_of_halves": (lambda: replaced(rotary_pos_embedding, "own_chunks", one_half), DIFFERS),
    "blocks_not_joined": (lambda: deleted_call(context_parallel, "join_block"), DIFFERS),
    "later_ranks_not_seen": (lambda: replaced(context_parallel, "_Block", EarlierKeysOnly), DIFFERS),
    "own_later_keys_seen": (lambda: replaced(context_parallel, "_Block", AllOwnKeys), DIFFERS),
    "key_gradients_not_returned": (
        lambda: replaced(context_parallel.RingExchange, "sum_at_owner", own_share_only),
        DIFFERS,
    ),
    "tokens_counted_on_one_rank": (lambda: deleted_call(step, "all_reduce"), DIFFERS),
    "loads_counted_on_one_rank": (lambda: replaced(load_balance, "sum_over", local), DIFFERS),
}


def mutated_step_job(mutant, *arguments):
    """`step_job` with one fault."""
    with MUTANTS[mutant][0]():
        return step_job(*arguments)


def compare_mutant(pool, mutant):
    config = CASE.config(Layout())
    weights, batch = make_weights(config, SHAPE, seed=3), masked_batch(UNEVEN[:2], 2, seq_length=SEQ_LENGTH)
    ranks = pool.run(mutated_step_job, mutant, CASE, split(cp=2, ep=2), batch, weights, None, 1, {}, world_size=2)
    assert_matches(reference_step(config, SHAPE, batch, weights), join_ranks(ranks))


@pytest.mark.parametrize("mutant", sorted(set(MUTANTS) - {"none"}))
def test_sweep_catches_mutant(pool, mutant):
    with pytest.raises(AssertionError, match=MUTANTS[mutant][1]) as caught:
        compare_mutant(pool, mutant)
    assert not isinstance(caught.value, RankErrors), "the mutant broke the job instead of its result"


def test_job_without_mutant_passes(pool):
    compare_mutant(pool, "none")
