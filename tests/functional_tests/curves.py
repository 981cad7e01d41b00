"""The cases of 200 steps in bf16 and in each FP8 recipe, for the tests on a CPU and on a GPU.

A curve ends at the mean loss of its last 20 steps. In bf16 that end moves by 0.2 % if the batch is split in other ways.
"""

from __future__ import annotations

from tests.functional_tests.cases import find_cases
from tests.functional_tests.golden import END_RTOL, end_of, find_golden
from tools.run_metrics import Series, read_golden

CURVES = {case.folder.name: case for case in find_cases() if case.folder.parent.name == "gpt_fp8_curves"}
IN_FP8 = [name for name in CURVES if name != "bf16"]
LEARNED = 1.8
"""Nats per byte that every end is below; with letter frequencies alone it would be 3.06, with pairs of letters 2.23."""


def recorded_curve(name: str) -> Series:
    """The losses of a case on a CPU."""
    return read_golden(find_golden(CURVES[name].folder))["lm loss"]


def ends_like(losses: Series, bf16: Series) -> bool:
    """Whether a curve is whole and ends within 1 % of the one in bf16; prints by how much."""
    if len(losses) != len(bf16):
        return False
    off = end_of(losses) / end_of(bf16) - 1
    print(f"ends at {end_of(losses):.4f}, {off:+.2%} of bf16")
    return abs(off) <= END_RTOL
