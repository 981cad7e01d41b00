"""The router with kernels, interpreted, beside the plain one: routing, losses, counts, gradients."""

import pytest
import torch

from megatron.core.pipeline_parallel.overlap.protocol import SavedRouting
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from tests.common.moe_layers import moe_config, normal
from tests.common.mutants import replaced

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CASES = {
    "aux_loss": {"moe_aux_loss_coeff": 0.1},
    "z_loss": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, **SIGMOID},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
    "per_token": {"moe_aux_loss_coeff": 0.1, "calculate_per_token_loss": True, "moe_router_pre_softmax": True},
    "capacity": {"moe_aux_loss_coeff": 0.1, "moe_expert_capacity_factor": 0.5},
    "scaled": {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 2.5},
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, **SIGMOID},
}


def run(fields, is_fused, is_masked):
    """All that a router leaves behind after two microbatches, the second recomputed."""
    module = TopKRouter(
        moe_config(**fields, moe_router_fusion=is_fused), pg_collection=ProcessGroupCollection(), layer_number=1
    )
    with torch.no_grad():
        module.weight.copy_(normal(*module.weight.shape, seed=3))
        if module.expert_bias is not None:
            module.expert_bias.copy_(normal(len(module.expert_bias), seed=4))
    mask = torch.arange(12).view(6, 2) % 5 == 2 if is_masked else None
    results, saved = [], SavedRouting()
    for seed in (0, 1):
        hidden = normal(6, 2, 16, seed=seed).float().requires_grad_()
        if seed:
            with torch.no_grad():
                module(hidden, mask, saved)
        probs, routing_map = module(hidden, mask, saved if seed else None)
        (probs * normal(*probs.shape, seed=9).float()).sum().backward()
        results += [probs.detach(), routing_map, hidden.grad]
    return [*results, module.weight.grad, module.metrics.sums, module.tokens_per_expert]


def both_job(fields, is_masked):
    with replaced(router_module, "uses_kernels", lambda _: True):
        return run(fields, True, is_masked), run(fields, False, is_masked)


@pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_route_as_the_plain_form(interpreted, name, is_masked):
    fused, plain = interpreted(both_job, {"params_dtype": torch.float32} | CASES[name], is_masked)
    for one, other in zip(fused, plain, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def kernels_used_job(fields):
    """How often the router of these fields routes by kernels."""
    calls = []
    count = router_module.fused_routing

    def counted(*arguments):
        calls.append(arguments)
        return count(*arguments)

    with (
        replaced(router_module, "uses_kernels", lambda _: True),
        replaced(router_module, "fused_routing", counted),
    ):
        run(fields, True, False)
    return len(calls)


@pytest.mark.parametrize(("name", "expected"), [("aux_loss", 3), ("groups", 0)])
def test_kernels_run_where_the_rule_allows(interpreted, name, expected):
    assert interpreted(kernels_used_job, {"params_dtype": torch.float32} | CASES[name]) == expected
