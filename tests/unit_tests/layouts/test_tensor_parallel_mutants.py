"""The comparison with the reference notices faults of layers and sequences split over tensor-parallel ranks."""

import importlib
from contextlib import nullcontext

import pytest

from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import cross_entropy, linear_autograd, vocab_embedding
from megatron.core.transformer import attention
from megatron.core.transformer.moe.dispatchers import alltoall
from tests.common.layouts import Layout, join_ranks, step_job
from tests.common.mutants import deleted_call, replaced
from tests.common.pool import RankErrors
from tests.common.reference import assert_matches, make_weights, reference_step
from tests.unit_tests.layouts.cases import make_batch, make_case
from tests.unit_tests.layouts.test_tensor_parallel_sweep import DENSE, EXPERTS, SHAPE, moe

# the package exports a function of the module's name
FINALIZE = importlib.import_module("megatron.core.distributed.finalize_model_grads")
MOE = make_case(SHAPE, **EXPERTS), moe(etp=2)
DENSE_WITH_WHOLE_SEQUENCES = make_case(SHAPE, **DENSE, qk_layernorm=True), Layout(tp=2)


def local_sum(rows, counts, group):
    """The summand of this rank in place of the sum."""
    first = sum(counts[: group.rank()])
    return rows[first : first + counts[group.rank()]]


def no_sum(partial, group, is_sequence_parallel):
    own = partial.chunk(group.size())[group.rank()] if is_sequence_parallel else partial
    return own.contiguous(), None


def keep_shard(output, group):
    return output.chunk(group.size())[group.rank()]


DIFFERS = r"differ"
MUTANTS = {
    "none": (nullcontext, ""),
    "partial_gradients_not_summed": (lambda: deleted_call(FINALIZE, "sum_partial_gradients"), DIFFERS),
    "head_norms_not_marked": (lambda: deleted_call(attention, "sum_gradient_over_tp"), DIFFERS),
    "input_gradient_not_summed": (lambda: replaced(linear_autograd, "_start_sum", no_sum), DIFFERS),
    "shards_of_an_expert_not_summed": (lambda: replaced(alltoall, "reduce_uneven_rows", local_sum), DIFFERS),
    "embedding_rows_not_summed": (
        lambda: replaced(vocab_embedding, "reduce_scatter_to_sequence_parallel_region", keep_shard),
        DIFFERS,
    ),
    "vocabulary_sums_stay_local": (lambda: deleted_call(cross_entropy, "all_reduce"), DIFFERS),
    "norm_of_local_shards_only": (lambda: deleted_call(clip_grads, "all_reduce"), r"gradient norms \["),
}


def mutated_step_job(mutant, *arguments):
    """`step_job` with one fault."""
    with MUTANTS[mutant][0]():
        return step_job(*arguments)


def compare_mutant(pool, mutant):
    case, layout = DENSE_WITH_WHOLE_SEQUENCES if mutant == "head_norms_not_marked" else MOE
    config = case.config(Layout())
    weights, batch = make_weights(config, case.shape, seed=3), make_batch(2)
    ranks = pool.run(mutated_step_job, mutant, case, layout, batch, weights, None, 1, {}, world_size=2)
    assert_matches(reference_step(config, case.shape, batch, weights), join_ranks(ranks))


@pytest.mark.parametrize("mutant", sorted(set(MUTANTS) - {"none"}))
def test_sweep_catches_mutant(pool, mutant):
    with pytest.raises(AssertionError, match=MUTANTS[mutant][1]) as caught:
        compare_mutant(pool, mutant)
    assert not isinstance(caught.value, RankErrors), "the mutant broke the job instead of its result"


def test_job_without_mutant_passes(pool):
    compare_mutant(pool, "none")
