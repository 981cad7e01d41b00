"""Balancing losses of one rank: values, gradients, padding, per-token scale."""

import pytest
import torch

from megatron.core import aux_loss_scale
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from tests.common.moe_layers import moe_config, normal
from tests.unit_tests.core.transformer.moe.test_topk import LOGITS

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@pytest.fixture(autouse=True)
def fresh_scale():
    aux_loss_scale.reset()


def router(kind="aux_loss", coeff=0.01, **fields):
    config = moe_config(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coeff, **fields)
    return TopKRouter(config, pg_collection=ProcessGroupCollection(), layer_number=1)


def logged(module):
    """Non-zero figures of the log."""
    names = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
    return {name: value for name, value in zip(names, module.metrics.sums.tolist(), strict=False) if value}


def gate_gradient(module, hidden, mask=None, microbatches=1):
    """Gradient of the router weight from the auxiliary losses alone."""
    for part in hidden.chunk(microbatches, dim=1):
        probs, _ = module(part, mask)
        (probs * 0.0).sum().backward()
    return module.weight.grad


@pytest.mark.parametrize(("score_function", "expected"), [("softmax", 1.527994), ("sigmoid", 1.07408)])
def test_known_aux_losses(score_function, expected):
    module = router(num_moe_experts=8, moe_router_score_function=score_function)
    module.routing(LOGITS.unsqueeze(1))
    assert logged(module)["load_balancing_loss"] == pytest.approx(expected, abs=1e-5)


def test_known_z_loss():
    module = router(num_moe_experts=8, coeff=0.0, moe_z_loss_coeff=1e-3)
    module.routing(LOGITS.unsqueeze(1))
    assert logged(module) == {"z_loss": pytest.approx(11.2252, abs=1e-4)}


@pytest.mark.parametrize("kind", KINDS)
def test_perfect_balance_gives_one(kind):
    module = router(kind, moe_router_topk=1, moe_router_pre_softmax=True)
    logits = 20.0 * torch.eye(4, dtype=torch.float64).repeat(2, 1).unsqueeze(1).expand(8, 3, 4)
    module.routing(logits)
    assert list(logged(module).values()) == [pytest.approx(1.0, abs=1e-6)]


def by_definition(kind, logits, topk, coeff):
    """Loops over the formulas, logits [s, B, E]."""

    def one(rows):
        scores = torch.softmax(rows, dim=-1)
        counts = torch.zeros(rows.shape[1], dtype=torch.float64)
        for row in rows:
            counts[row.topk(topk).indices] += 1
        return coeff * rows.shape[1] / (topk * len(rows) ** 2) * (scores.sum(0) * counts).sum()

    if kind == "seq_aux_loss":
        return torch.stack([one(logits[:, b]) for b in range(logits.shape[1])]).mean()
    return one(logits.flatten(0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_formula(kind):
    module, hidden = router(kind), normal(6, 3, 16)
    got = gate_gradient(module, hidden)
    weight = module.weight.detach().clone().requires_grad_()
    by_definition(kind, hidden @ weight.t(), 2, 0.01).backward()
    assert torch.allclose(got, weight.grad, rtol=1e-12, atol=1e-18)


def test_several_losses_add_their_gradients():
    hidden = normal(6, 2, 16)
    both = gate_gradient(router(["aux_loss", "seq_aux_loss"], [0.01, 0.5], moe_z_loss_coeff=0.1), hidden)
    alone = [router("aux_loss", 0.01), router("seq_aux_loss", 0.5), router(coeff=0.0, moe_z_loss_coeff=0.1)]
    assert torch.allclose(both, sum(gate_gradient(module, hidden) for module in alone), rtol=1e-12)


def test_map_of_the_loss_ignores_bias_and_groups():
    plain = router(moe_router_score_function="sigmoid")
    shifted = router(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
    )
    shifted.expert_bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    logits = normal(8, 2, 4)
    assert not torch.equal(plain.routing(logits)[1], shifted.routing(logits)[1])
    assert logged(plain) == logged(shifted)


def test_loss_sees_the_map_before_drops():
    logits = normal(8, 2, 4)
    free, tight = router(), router(moe_expert_capacity_factor=0.25)
    assert not torch.equal(free.routing(logits)[1], tight.routing(logits)[1])
    assert logged(free) == logged(tight)


def test_global_loss_averages_counts_over_the_microbatches_so_far_and_forgets_them_after_the_step():
    module = router("global_aux_loss", 1.0, moe_router_topk=1, moe_router_pre_softmax=True)
    first, second = (9.0 * torch.eye(4, dtype=torch.float64)[[e] * 4].unsqueeze(1) for e in (0, 1))
    top, rest = torch.softmax(first[0, 0], 0)[:2].tolist()
    expected = [4 * top, 4 * (0.5 * rest + 0.5 * top), 4 * top]  # E * sum_e share of e * mean score of e
    values = []
    for i, logits in enumerate((first, second, first)):
        module.metrics.sums.zero_()
        module.routing(logits)
        values.append(logged(module)["global_load_balancing_loss"])
        if i == 1:
            module.apply_step_counts(module.step_counts())
    assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_padding_equals_cropping(kind, per_token):
    fields = {"coeff": 0.0 if kind == "none" else 0.01, "moe_z_loss_coeff": 0.1, "calculate_per_token_loss": per_token}
    padded, cropped, hidden = router(kind, **fields), router(kind, **fields), normal(8, 3, 16)
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[4:] = True
    got, expected = gate_gradient(padded, hidden, mask), gate_gradient(cropped, hidden[:4])
    assert torch.allclose(got, expected, rtol=1e-12)
    assert padded.step_counts().tolist() == cropped.step_counts().tolist()
    assert logged(padded) == pytest.approx(logged(cropped))


@pytest.mark.parametrize("kind", KINDS)
def test_mask_without_padding_changes_nothing(kind):
    hidden = normal(8, 3, 16)
    without, with_mask = router(kind, moe_z_loss_coeff=0.1), router(kind, moe_z_loss_coeff=0.1)
    expected = gate_gradient(without, hidden)
    assert torch.equal(gate_gradient(with_mask, hidden, torch.zeros(8, 3, dtype=torch.bool)), expected)
    assert torch.equal(with_mask.metrics.sums, without.metrics.sums)


def test_a_batch_of_padding_alone_gives_zeros():
    module = router(["aux_loss", "seq_aux_loss", "global_aux_loss"], [1.0, 1.0, 1.0], moe_z_loss_coeff=0.1)
    gradient = gate_gradient(module, normal(4, 2, 16), torch.ones(4, 2, dtype=torch.bool))
    assert gradient.abs().sum() == 0.0


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_per_token_loss_multiplies_by_the_tokens_that_are_divided_out_later(kind):
    fields = {"coeff": 0.0 if kind == "none" else 0.01, "moe_z_loss_coeff": 0.1}
    hidden = normal(6, 3, 16)
    mean = gate_gradient(router(kind, **fields), hidden)
    total = gate_gradient(router(kind, calculate_per_token_loss=True, **fields), hidden)
    assert torch.allclose(total / 18, mean, rtol=1e-12)


@pytest.mark.parametrize("mode", ["evaluation", "no_grad"])
def test_nothing_is_recorded_without_training(mode):
    module = router(moe_z_loss_coeff=0.1)
    module.train(mode != "evaluation")
    with torch.set_grad_enabled(mode != "no_grad"):
        module(normal(4, 2, 16))
    assert module.metrics.sums.abs().sum() == 0.0
    assert module.step_counts().sum() == 0
