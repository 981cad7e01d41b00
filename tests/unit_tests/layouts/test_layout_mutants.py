"""The sweep would notice: each mutant puts one fault into a job, and the comparison with the reference must fail."""

import importlib
from contextlib import nullcontext

import pytest

from megatron.core.distributed import distributed_data_parallel
from megatron.core.distributed.grad_scaling import GradReduction
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import step
from megatron.core.transformer.moe import load_balance, router
from megatron.core.transformer.moe.dispatchers import alltoall
from tests.common.layouts import Layout, join_ranks, step_job
from tests.common.mutants import deleted_call, replaced, scaled_result
from tests.common.pool import RankErrors
from tests.common.reference import assert_matches, make_weights, reference_step
from tests.unit_tests.layouts.cases import EP2, make_batch, make_case

CASE = make_case(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type=["aux_loss", "global_aux_loss"],
    moe_aux_loss_coeff=[0.05, 0.04],
    moe_z_loss_coeff=0.02,
    moe_expert_capacity_factor=1.0,
)
# the package exports a function of the module's name
FINALIZE = importlib.import_module("megatron.core.distributed.finalize_model_grads")
GRAD_REDUCTION = distributed_data_parallel.grad_reduction
ROUTING_WEIGHTS = router.routing_weights
EXCHANGE_ROWS = alltoall.exchange_rows


def divide_experts_by_their_replicas(**sizes):
    right = GRAD_REDUCTION(**sizes)
    return GradReduction(1.0 / sizes["expt_dp_size"], right.op) if sizes["is_expert"] else right


def sum_nothing(values, group):
    del group
    return values


def weights_without_gradient(scores, indices, rule):
    return ROUTING_WEIGHTS(scores.detach(), indices, rule)


def exchange_probs_without_gradient(rows, *args):
    return EXCHANGE_ROWS(rows.detach() if rows.dim() == 1 else rows, *args)


def keep_every_pair(probs, routing_map, *_):
    return probs, routing_map


class ReversedRows:
    """Stands in for the shuffle from arrival order to expert order."""

    def apply(self, rows):
        return rows.flip(0)

    undo = apply


def reversed_rows(*_, **__):
    return ReversedRows()


GRADIENTS = r"gradients differ"
MUTANTS = {
    "expert_bias_never_moves": (lambda: deleted_call(FINALIZE, "apply_step_counts"), r"bias of layer 1"),
    "experts_divided_by_their_replicas": (
        lambda: replaced(distributed_data_parallel, "grad_reduction", divide_experts_by_their_replicas),
        r"mlp\.experts\.linear_fc2\.weight\d: 1, 2\n",
    ),
    "auxiliary_scale_doubled": (lambda: scaled_result(step, "_aux_loss_scale", 2.0), GRADIENTS),
    "global_counts_stay_local": (lambda: replaced(load_balance, "sum_over", sum_nothing), GRADIENTS),
    "z_loss_not_attached": (
        lambda: replaced(load_balance.LoadBalancer, "attach_z_loss", lambda self, logits, is_real, tokens: logits),
        GRADIENTS,
    ),
    "router_without_gradient": (lambda: replaced(router, "routing_weights", weights_without_gradient), GRADIENTS),
    "probs_lose_their_gradient_on_the_way": (
        lambda: replaced(alltoall, "exchange_rows", exchange_probs_without_gradient),
        GRADIENTS,
    ),
    "rows_not_sorted_by_expert": (lambda: replaced(alltoall, "regroup_by_expert", reversed_rows), GRADIENTS),
    "nothing_dropped": (lambda: replaced(router, "apply_capacity", keep_every_pair), GRADIENTS),
    "none": (nullcontext, ""),
    "norm_of_local_experts_only": (lambda: deleted_call(clip_grads, "all_reduce"), r"gradient norms \["),
}


def mutated_step_job(mutant, *arguments):
    """`step_job` with one fault."""
    with MUTANTS[mutant][0]():
        return step_job(*arguments)


def compare_mutant(pool, mutant, layout):
    config = CASE.config(Layout())
    weights = make_weights(config, CASE.shape, seed=3)
    batch = make_batch()
    ranks = pool.run(mutated_step_job, mutant, CASE, layout, batch, weights, None, 1, {}, world_size=layout.world_size)
    assert_matches(reference_step(config, CASE.shape, batch, weights, data_parallel_size=layout.dp), join_ranks(ranks))


@pytest.mark.parametrize("mutant", sorted(set(MUTANTS) - {"none"}))
def test_sweep_catches_mutant(pool, mutant):
    with pytest.raises(AssertionError, match=MUTANTS[mutant][1]) as caught:
        compare_mutant(pool, mutant, EP2)
    assert not isinstance(caught.value, RankErrors), "the mutant broke the job instead of its result"


def test_job_without_mutant_passes(pool):
    compare_mutant(pool, "none", EP2)
