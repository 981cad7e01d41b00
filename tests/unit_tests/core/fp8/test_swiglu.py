"""SwiGLU and quantisation in one kernel, interpreted, against one after the other with kernels of their own."""

import dataclasses
import math

import pytest
import torch

from megatron.core.fp8 import swiglu
from megatron.core.fp8.kernel_operand import kernel_activation
from megatron.core.fp8.quantize import AmaxHistory
from megatron.core.fp8.recipes import RECIPES
from megatron.core.fusions import fp8_swiglu
from megatron.core.fusions.fused_swiglu import kernel_swiglu, kernel_swiglu_backward
from tests.common.fp8 import COUNTS, UNEVEN, activation, ends_of, parts_of, same_bits
from tests.common.mutants import replaced

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Case:
    """What is quantised, and how."""

    recipe: str
    width: int
    counts: tuple[int, ...] = COUNTS[0]
    bad: float | None = None
    past: float | None = None
    has_probs: bool = True
    dtype: torch.dtype = torch.bfloat16


def operands(case):
    """dy [R, f], x [R, 2f], probs [R], row ends; the rows behind the last expert's are NaN."""
    x = activation(case.counts, torch.float32, columns=2 * case.width, bad=case.bad).clamp(-64, 64).to(case.dtype)
    grad = activation(case.counts, torch.float32, columns=case.width).flip(1).to(case.dtype)
    probs = torch.linspace(-1, 2, len(x)) if case.has_probs else None
    return grad, x, probs, ends_of(case.counts)


def history_of(case):
    return None if case.past is None else AmaxHistory(torch.tensor(case.past), torch.zeros(()), margin=1)


def fused_job(case):
    """Codes of y and d x, d p, and the amaxes noted."""
    (grad, x, probs, ends), histories = operands(case), (history_of(case), history_of(case))
    recipe = RECIPES[case.recipe]
    with replaced(fp8_swiglu, "has_quantize_kernels", lambda values: True), replaced(fp8_swiglu, "_KERNEL_BYTES", 2):
        y = swiglu.quantize_swiglu(x, probs, recipe, E4M3, ends, histories[0])
        grad_x, grad_probs = swiglu.quantize_swiglu_gradient(grad, x, probs, recipe, E5M2, ends, histories[1])
    return parts_of(y), parts_of(grad_x), grad_probs, [one and one.noted for one in histories]


def apart_job(case):
    """The same from kernels of their own."""
    (grad, x, probs, ends), histories = operands(case), (history_of(case), history_of(case))
    recipe = RECIPES[case.recipe]
    y = kernel_activation(kernel_swiglu(x, None, probs), recipe, E4M3, ends, histories[0])
    grad_x, grad_probs = kernel_swiglu_backward(grad, x, None, probs)
    grad_x = kernel_activation(grad_x, recipe, E5M2, ends, histories[1])
    return parts_of(y), parts_of(grad_x), grad_probs, [one and one.noted for one in histories]


CASES = [
    Case("tensorwise", 48),
    Case("tensorwise", 144, bad=math.inf),
    Case("delayed", 144, counts=UNEVEN, past=0.0),
    Case("delayed", 144, past=3.0, has_probs=False),
    Case("delayed", 48, past=3.0, bad=math.nan),
    Case("delayed", 48, past=1e-3, bad=-math.inf, dtype=torch.float16),
    Case("blockwise", 128),
    Case("blockwise", 256, bad=math.nan, has_probs=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.recipe} {case.width} past {case.past} bad {case.bad}")
def test_codes_in_one_have_the_bits_of_two_steps(interpreted, case):
    y, grad_x, grad_probs, noted = interpreted(fused_job, case)
    want_y, want_grad_x, want_grad_probs, want_noted = interpreted(apart_job, case)
    assert same_bits(y, want_y) == []
    assert same_bits(grad_x, want_grad_x) == []
    if case.past is not None:
        torch.testing.assert_close(torch.stack(noted), torch.stack(want_noted), rtol=0, atol=0, equal_nan=True)
    if case.has_probs:
        rows = slice(0, sum(case.counts))
        torch.testing.assert_close(grad_probs[rows], want_grad_probs[rows], rtol=1e-5, atol=1e-5, equal_nan=True)
