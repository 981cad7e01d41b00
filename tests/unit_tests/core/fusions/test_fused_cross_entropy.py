"""The kernels of the cross entropy, interpreted, against the formula in fp64."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.fusions.fused_cross_entropy import _gradient_kernel, _scan_kernel
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.common.hopper import ptx
from tests.common.mutants import replaced
from tests.common.small_models import normal

STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2e-6}


def fused_job(logits, targets, num_real, grad):
    """Losses of the kernels, and the gradient of this rank's columns, asked for twice."""
    size, rank = dist.get_world_size(), dist.get_rank()
    own = logits.chunk(size, -1)[rank].clone().requires_grad_()
    before = own.detach().clone()
    with replaced(cross_entropy, "uses_loss_kernels", lambda *_: True):
        losses = vocab_parallel_cross_entropy(
            own.transpose(0, 1),
            targets.transpose(0, 1),
            tp_group=dist.group.WORLD if size > 1 else None,
            true_vocab_size=num_real,
            fuses=True,
        )
    (first,) = torch.autograd.grad(losses, own, grad.transpose(0, 1), retain_graph=True)
    (second,) = torch.autograd.grad(losses, own, grad.transpose(0, 1))
    assert torch.equal(first, second)
    assert torch.equal(own.detach().nan_to_num(), before.nan_to_num())
    return losses.detach().transpose(0, 1), first


def expected(logits, targets, num_real, grad):
    """Losses and gradient of the formula."""
    wide = logits.double()[..., :num_real].requires_grad_()
    losses = torch.logsumexp(wide, -1) - wide.gather(-1, targets[..., None])[..., 0]
    losses.backward(grad.double())
    padded = torch.zeros(logits.shape, dtype=torch.float64)
    padded[..., :num_real] = wide.grad
    return losses.detach(), padded


def make_case(shape, num_real, dtype, scale=3.0):
    """Logits whose filler columns are NaN, targets at both ends of the vocabulary, gradients with a zero."""
    logits = (normal(*shape) * scale).to(dtype)
    logits[..., num_real:] = float("nan")
    targets = torch.randint(num_real, shape[:-1], generator=torch.Generator().manual_seed(1))
    grad = normal(*shape[:-1], seed=2, dtype=torch.float32)
    if targets.numel() > 1:
        targets.view(-1)[0], targets.view(-1)[-1] = 0, num_real - 1
        grad.view(-1)[0] = 0.0
    return logits, targets, num_real, grad


def check(got, case):
    losses, grad = got
    expected_losses, expected_grad = expected(*case)
    assert (losses.dtype, grad.dtype) == (torch.float32, case[0].dtype)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=STEPS[grad.dtype], atol=2e-7)
    assert torch.count_nonzero(grad[..., case[2] :]) == 0


CASES = {
    "vocab_7": ((3, 2, 7), 7, torch.bfloat16),
    "one_real_column": ((3, 2, 8), 1, torch.bfloat16),
    "one_token": ((1, 1, 130), 129, torch.float32),
    "no_token": ((0, 2, 16), 16, torch.bfloat16),
    "vocab_50257": ((2, 1, 50304), 50257, torch.bfloat16),
    "fp16": ((2, 2, 40), 37, torch.float16),
    "fp32_large": ((2, 2, 9000), 8999, torch.float32, 1e4),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_formula(interpreted, name):
    case = make_case(*CASES[name])
    check(interpreted(fused_job, *case), case)


@pytest.mark.parametrize("num_columns", [8, 16, 20], ids=["one_filler", "rank_of_filler", "more_filler"])
def test_split_vocabulary_is_scored_as_a_whole(interpreted, num_columns):
    case = make_case((3, 2, num_columns), 7, torch.float32)
    ranks = interpreted.ranks(fused_job, *case)
    assert torch.equal(ranks[0][0], ranks[1][0])
    check((ranks[0][0], torch.cat([grad for _, grad in ranks], -1)), case)


def test_padding_tokens_get_a_gradient_of_zeros(interpreted):
    logits, targets, num_real, grad = make_case((3, 2, 9), 9, torch.bfloat16)
    _, got = interpreted(fused_job, logits, targets, num_real, 0 * grad)
    assert torch.count_nonzero(got) == 0


def test_token_outside_the_vocabulary_has_no_loss(interpreted):
    logits, targets, num_real, grad = make_case((3, 1, 9), 7, torch.float32)
    targets[0, 0], targets[1, 0] = 7, -1
    losses, _ = interpreted(fused_job, logits, targets, num_real, grad)
    assert losses.isnan().flatten().tolist() == [True, True, False]


def test_plain_form_serves_what_the_kernels_do_not():
    logits, targets = normal(3, 2, 7), torch.zeros(3, 2, dtype=torch.int64)
    plain = vocab_parallel_cross_entropy(logits, targets)
    assert torch.equal(vocab_parallel_cross_entropy(logits, targets, fuses=True), plain)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile_for_hopper(dtype):
    types = dict.fromkeys(("logits", "result"), f"*{dtype}") | dict.fromkeys(("found", "peaks", "totals"), "*fp32")
    types |= {"targets": "*i64", "grads": "*fp32"}
    for kernel, constants in ((_scan_kernel, {}), (_gradient_kernel, {"interpreted": False})):
        assert ".target sm_90" in ptx(kernel, {"columns": 1024} | constants, types)
