"""The sweep of pipelines would notice: each mutant puts one fault into a job with stages, and the comparison fails."""

from contextlib import nullcontext

import pytest

from megatron.core.pipeline_parallel import executor, p2p
from megatron.core.pipeline_parallel.actions import Direction
from megatron.core.transformer import transformer_layer
from tests.common.layouts import Layout, join_ranks, step_job
from tests.common.mutants import replaced
from tests.common.pool import RankErrors
from tests.common.reference import assert_matches, make_weights, reference_step
from tests.unit_tests.layouts.cases import make_batch, make_case

CASE = make_case(num_layers=4, moe_layer_freq=[1, 1, 0, 1], moe_aux_loss_coeff=0.01)
PP2_VPP2 = Layout(pp=2, vpp=2)
OUTPUT_GRADIENT = executor.output_gradient
POST_MESSAGES = p2p.post_messages
BUILD_MLP = transformer_layer._build_mlp
TAKE = p2p.Mailbox.take


def auxiliary_scale_in_the_last_stage_only(context, loss, received):
    return OUTPUT_GRADIENT(context, loss, received) if received is None else received


def post_from_behind(messages, *arguments):
    return POST_MESSAGES(messages[::-1], *arguments)[::-1]


def layers_counted_from_the_stage(spec, config, layer_number, groups):
    return BUILD_MLP(spec, config, (layer_number - 1) % 2 + 1, groups)


def gradient_without_waiting(mailbox, key):
    if key[0] is Direction.ACTIVATION:
        return TAKE(mailbox, key)
    buffer, handles = mailbox._arriving.pop(key)
    early = buffer.clone().zero_()  # what was there before the message
    for handle in handles:
        handle.wait()
    return early


GRADIENTS = "gradients differ"
MUTANTS = {
    "auxiliary_scale_in_the_last_stage_only": (
        lambda: replaced(executor, "output_gradient", auxiliary_scale_in_the_last_stage_only),
        GRADIENTS,
    ),
    "messages_of_a_group_in_another_order": (lambda: replaced(p2p, "post_messages", post_from_behind), GRADIENTS),
    "gradient_read_before_it_came": (lambda: replaced(p2p.Mailbox, "take", gradient_without_waiting), GRADIENTS),
    "layers_counted_from_the_stage": (
        lambda: replaced(transformer_layer, "_build_mlp", layers_counted_from_the_stage),
        "aux_loss: expected",
    ),
    "none": (nullcontext, ""),
}


def mutated_step_job(mutant, *arguments):
    """`step_job` with one fault."""
    with MUTANTS[mutant][0]():
        return step_job(*arguments)


def compare_mutant(pool, mutant):
    config, batch = CASE.config(Layout()), make_batch()
    weights = make_weights(config, CASE.shape, seed=3)
    ranks = pool.run(mutated_step_job, mutant, CASE, PP2_VPP2, batch, weights, None, 1, {}, world_size=2)
    assert_matches(reference_step(config, CASE.shape, batch, weights), join_ranks(ranks))


@pytest.mark.parametrize("mutant", sorted(set(MUTANTS) - {"none"}))
def test_sweep_catches_fault_of_a_pipeline(pool, mutant):
    with pytest.raises(AssertionError, match=MUTANTS[mutant][1]) as caught:
        compare_mutant(pool, mutant)
    assert not isinstance(caught.value, RankErrors), "the mutant broke the job instead of its result"


def test_pipeline_without_mutant_passes(pool):
    compare_mutant(pool, "none")
