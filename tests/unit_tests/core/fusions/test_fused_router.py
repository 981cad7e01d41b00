"""The kernels of the router, interpreted, against the plain form in fp64, gradients included."""

from dataclasses import replace

import pytest
import torch

from megatron.core.fusions.fused_router import (
    RoutedTokens,
    ScoreRule,
    _gradient_kernel,
    _route_kernel,
    fused_routing,
)
from megatron.core.transformer.moe.load_balance import loss_scores, plain_choice
from megatron.core.transformer.moe.topk import (
    RoutingRule,
    routing_weights,
    scatter_routing,
    score_experts,
    select_topk,
    selection_scores,
)
from tests.common.hopper import ptx
from tests.common.small_models import normal

KINDS = ("softmax", "pre_softmax", "sigmoid", "sqrtsoftplus")


def plain_rule(rule):
    name = "softmax" if rule.kind == "pre_softmax" else rule.kind
    return RoutingRule(rule.topk, name, rule.kind == "pre_softmax", scaling_factor=rule.scaling)


def routing_job(logits, rule, tokens, grads):
    """What the kernels give, and the gradient of the logits."""
    leaf = logits.clone().requires_grad_()
    got = fused_routing(leaf, rule, tokens)
    grad_probs, grad_sums = (grad.to(leaf.device) for grad in grads)
    torch.autograd.backward([got.probs, got.score_sums], [grad_probs.to(got.probs.dtype), grad_sums])
    fields = (got.probs, got.routing_map, got.indices, got.score_sums, got.counts, got.plain_counts)
    return [x.detach().cpu() for x in fields], leaf.grad.cpu()


def expected(logits, rule, tokens, grads):
    """The same by the plain form, in fp64."""
    wide, plain = logits.double().requires_grad_(), plain_rule(rule)
    scores = score_experts(wide, plain)
    indices = tokens.indices
    if indices is None:
        indices = select_topk(selection_scores(wide, scores, plain, tokens.bias), plain)
    probs, routing_map = scatter_routing(indices, routing_weights(scores, indices, plain), wide.shape[1], wide.dtype)
    num_tokens, num_experts = wide.shape
    real = torch.ones(num_tokens, 1) if tokens.is_real is None else tokens.is_real[:, None]
    split = (num_tokens // tokens.num_samples, tokens.num_samples, num_experts)
    sums = (loss_scores(wide, plain) * real).view(split).sum(0)
    counts = (routing_map * real).view(split).sum(0).long()
    plain_counts = (plain_choice(wide, rule.topk) * real).view(split).sum(0).long()
    torch.autograd.backward([probs, sums], [grad.double() for grad in grads])
    return [x.detach() for x in (probs, routing_map, indices, sums, counts, plain_counts)], wide.grad


def make_case(kind, num_tokens, num_experts, topk, dtype=torch.float32, scale=2.0, **fields):
    """Logits without ties, and gradients of probabilities and sums."""
    num_samples = fields.pop("num_samples", 2)
    spread = torch.arange(num_tokens * num_experts).view(num_tokens, num_experts).flip(0) % 97
    logits = (normal(num_tokens, num_experts) * scale + spread * 1e-3).to(dtype)
    grads = normal(num_tokens, num_experts, seed=1).float(), normal(num_samples, num_experts, seed=2).float()
    return logits, ScoreRule(topk, kind, 2.5), RoutedTokens(num_samples, **fields), grads


def check(got, case, slack=1.0):
    """`slack` multiplies what fp32 may round; a GPU's exponential is coarser than the interpreter's."""
    (fields, grad), (wanted, wanted_grad) = got, expected(*case)
    probs, routing_map, indices, sums, counts, plain_counts = fields
    assert (probs.dtype, grad.dtype, sums.dtype) == (case[0].dtype, case[0].dtype, torch.float32)
    for one, other in zip((routing_map, indices, counts, plain_counts), (*wanted[1:3], *wanted[4:]), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    step = 2.0**-8 if probs.dtype == torch.bfloat16 else 3e-6 * slack
    torch.testing.assert_close(probs.double(), wanted[0], rtol=step, atol=1e-7 * slack)
    torch.testing.assert_close(sums.double(), wanted[3], rtol=3e-6 * slack, atol=1e-6 * slack)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=step, atol=2e-6 * slack)


def padding(num_tokens):
    return torch.arange(num_tokens) % 3 != 1


def cases():
    """Name -> arguments of `make_case` and its keyword arguments."""
    found = {f"{kind}_{k}": ((kind, 6, 5, k), {}) for kind in KINDS for k in (1, 2)}
    found |= {f"{kind}_bias": ((kind, 8, 8, 3), {"bias": normal(8, seed=3).float()}) for kind in KINDS}
    found |= {
        "many_experts": (("softmax", 40, 128, 8), {"num_samples": 4, "is_real": padding(40)}),
        "odd_experts": (("sigmoid", 70, 65, 6), {"num_samples": 1, "bias": normal(65, seed=3).float() * 0.1}),
        "one_token": (("pre_softmax", 1, 16, 2), {"num_samples": 1}),
        "no_token": (("softmax", 0, 16, 2), {"num_samples": 2}),
        "one_expert": (("softmax", 4, 1, 1), {}),
        "all_experts": (("sigmoid", 4, 4, 4), {}),
        "padding_only": (("softmax", 4, 8, 2), {"is_real": torch.zeros(4, dtype=torch.bool)}),
        "large_logits": (("sqrtsoftplus", 8, 16, 4), {"scale": 60.0}),
        "small_scores": (("sigmoid", 8, 16, 4), {"scale": 12.0}),
    }
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_plain_form(interpreted, name):
    arguments, fields = CASES[name]
    case = make_case(*arguments, **fields)
    check(interpreted(routing_job, *case), case)


@pytest.mark.parametrize("kind", KINDS)
def test_choice_made_before_is_kept(interpreted, kind):
    given = torch.tensor([[3, 0], [1, 2], [2, 3], [0, 1]])
    logits, rule, tokens, grads = make_case(kind, 4, 4, 2, bias=None)
    case = (logits, rule, replace(tokens, indices=given), grads)
    fields, grad = interpreted(routing_job, *case)
    wanted, wanted_grad = expected(*case)
    assert torch.equal(fields[1], wanted[1])
    torch.testing.assert_close(fields[0].double(), wanted[0], rtol=3e-6, atol=1e-7)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=3e-6, atol=2e-6)


def test_bf16_logits_are_scored_in_fp32_and_rounded_once(interpreted):
    case = make_case("softmax", 6, 5, 2, torch.bfloat16, scale=20.0)
    check(interpreted(routing_job, *case), case)


def test_ties_and_infinities_choose_distinct_experts(interpreted):
    logits = torch.zeros(3, 6)
    logits[1], logits[2] = -torch.inf, torch.nan
    fields, _ = interpreted(routing_job, logits, ScoreRule(4, "sigmoid"), RoutedTokens(1), (logits * 0, logits[:1] * 0))
    assert torch.equal(fields[2], torch.tensor([[0, 1, 2, 3]] * 3))
    assert fields[1].sum(dim=1).tolist() == [4, 4, 4]


@pytest.mark.parametrize(("kind", "is_full"), [(0, False), (1, True), (2, True), (3, False)])
def test_kernels_compile_for_hopper(kind, is_full):
    types = dict.fromkeys(("logits", "probs", "result", "grad_probs"), "*fp32")
    types |= {"bias": "*fp32", "is_real": "*i1", "chosen_map": "*u8", "indices": "*i64", "scaling": "fp32"}
    types |= {"partial_sums": "*fp32", "partial_counts": "*i32", "grad_sums": "*fp32"}
    sizes = {"topk": 2, "kind": kind, "interpreted": False, "block": 16, "width": 16}
    absent = {} if is_full else {"bias": None, "is_real": None}
    assert ".target sm_90" in ptx(_route_kernel, sizes | absent | {"is_given": is_full}, types)
    absent = {} if is_full else {"grad_sums": None, "is_real": None}
    assert ".target sm_90" in ptx(_gradient_kernel, sizes | absent, types)
