"""SwiGLU and quantisation in one kernel, interpreted, against one after the other with kernels of their own."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fp8 import swiglu
from megatron.core.fp8.kernel_operand import kernel_activation
from megatron.core.fp8.quantize import AmaxHistory
from megatron.core.fp8.recipes import RECIPES
from megatron.core.fusions import fp8_swiglu
from megatron.core.fusions.fp8_quantize import Given
from megatron.core.fusions.fp8_swiglu import BACKWARD_CUTS, FORWARD_CUTS, _backward_kernel, _forward_kernel
from megatron.core.fusions.fp8_swiglu_tiles import forward_amax_kernel, with_amax
from megatron.core.fusions.fused_swiglu import kernel_swiglu, kernel_swiglu_backward
from megatron.core.fusions.fused_weighted_activation import weighted_swiglu
from tests.common.compiled import compiled_for_hopper
from tests.common.fp8 import activation, ends_of, parts_of, same_bits
from tests.common.mutants import replaced

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Case:
    """What is quantised, and how."""

    recipe: str
    width: int
    counts: tuple[int, ...] = (16, 0, 48)
    bad: float | None = None
    past: float | None = None
    has_probs: bool = True
    dtype: torch.dtype = torch.bfloat16

    def operands(self, device="cpu"):
        """dy [R, f], x [R, 2f], probs [R], row ends; the rows behind the last expert's are NaN."""
        x = activation(self.counts, torch.float32, columns=2 * self.width).clamp(-64, 64)
        if self.bad is not None:
            x[17, 3] = self.bad
        x = x.to(device, self.dtype)
        grad = activation(self.counts, torch.float32, columns=self.width).flip(1).to(device, self.dtype)
        probs = torch.linspace(-1, 2, len(x), device=device) if self.has_probs else None
        return grad, x, probs, ends_of(self.counts, device)

    def histories(self, device="cpu"):
        """What is known of y and of d x."""
        if self.past is None:
            return None, None
        past = torch.tensor(self.past, device=device)
        return tuple(AmaxHistory(past, torch.zeros((), device=device), margin=1) for _ in range(2))

    def __str__(self):
        return f"{self.recipe}-{self.width}-past {self.past}-bad {self.bad}"


def in_one(case, device="cpu"):
    """Codes of y and d x, d p, and the amaxes noted."""
    (grad, x, probs, ends), histories, recipe = case.operands(device), case.histories(device), RECIPES[case.recipe]
    y = swiglu.quantize_swiglu(x, probs, recipe, E4M3, ends, histories[0])
    grad_x, grad_probs = swiglu.quantize_swiglu_gradient(grad, x, probs, recipe, E5M2, ends, histories[1])
    return parts_of(y), parts_of(grad_x), grad_probs, [one and one.noted for one in histories]


def apart(case, device="cpu"):
    """The same from kernels of their own."""
    (grad, x, probs, ends), histories, recipe = case.operands(device), case.histories(device), RECIPES[case.recipe]
    y = kernel_activation(kernel_swiglu(x, None, probs), recipe, E4M3, ends, histories[0])
    grad_x, grad_probs = kernel_swiglu_backward(grad, x, None, probs)
    grad_x = kernel_activation(grad_x, recipe, E5M2, ends, histories[1])
    return parts_of(y), parts_of(grad_x), grad_probs, [one and one.noted for one in histories]


def assert_same(case, got, want):
    """Equal bits but for d p, which is summed in another order."""
    for codes, wanted in zip(got[:2], want[:2], strict=True):
        assert same_bits(codes, wanted) == []
    if case.past is not None:
        torch.testing.assert_close(got[3], want[3], rtol=0, atol=0, equal_nan=True)
    if case.has_probs:
        grad, x, _, _ = case.operands(got[2].device)
        gate, up = x.double().chunk(2, dim=1)
        terms = (grad.double() * F.silu(gate) * up).abs().sum(1)[: sum(case.counts)]
        error = (got[2] - want[2])[: sum(case.counts)].abs()
        assert (error <= 2.0**-20 * terms)[terms.isfinite()].all()
        assert torch.equal(got[2].isfinite()[: len(terms)], want[2].isfinite()[: len(terms)])


def both_job(case):
    def backward(grad, x, probs):
        return kernel_swiglu_backward(grad, x, None, probs)

    with (
        replaced(fp8_swiglu, "has_quantize_kernels", lambda values: True),
        replaced(swiglu, "weighted_swiglu_backward", backward),
    ):
        return in_one(case), apart(case)


CASES = [
    Case("tensorwise", 24),
    Case("tensorwise", 136, bad=math.inf),
    Case("delayed", 24, past=0.0),
    Case("delayed", 136, past=3.0, has_probs=False),
    Case("delayed", 24, past=3.0, bad=math.nan),
    Case("delayed", 24, past=1e-3, bad=-math.inf, dtype=torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_in_one_have_the_bits_of_two_steps(interpreted, case):
    assert_same(case, *interpreted(both_job, case))


def amax_job():
    _, x, probs, ends = Case("tensorwise", 24).operands()
    x = (0.3 * x.float()).bfloat16()  # whose largest product is no number of bf16
    amax = with_amax(Given(), forward_amax_kernel, (x, probs), ends, (len(x), 24)).amax
    last = int(ends[-1])
    return amax.view(torch.float32).item(), weighted_swiglu(x[:last], probs[:last]).abs().max().item()


def test_largest_magnitude_is_that_of_the_rounded_result(interpreted):
    found, wanted = interpreted(amax_job)
    assert found == wanted > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "cuts"),
    [(_forward_kernel, FORWARD_CUTS), (_backward_kernel, BACKWARD_CUTS)],
    ids=["forward", "backward"],
)
def test_kernels_compile_for_hopper_and_move_16_bytes_at_a_time(kernel, cuts):
    for mode, cut in cuts.items():
        constants = {"BY_COLUMN": True, "SHRINK": 1.0, "IS_E5M2": False, "INTERPRETED": False, "BAND": cut.band}
        constants |= {"MODE": int(mode), "HIGH": cut.high, "LOW": cut.low, "COLUMNS": cut.columns}
        constants |= dict.fromkeys(("amax", "past", "noted")) if mode else {"column_scale": None}
        types = dict.fromkeys(("probs", "parts", "row_scale", "column_scale", "past"), "*fp32")
        types |= dict.fromkeys(("row_codes", "column_codes"), "*u8") | dict.fromkeys(("amax", "noted", "ends"), "*i32")
        ptx = compiled_for_hopper(kernel, constants, types)
        assert "ld.global.v4" in ptx
        assert "st.global.v4" in ptx
