"""Every case of this folder is launched through torchrun and compared with its golden values.

Long curves are left to test_fp8_curves.py, which runs each of them once for all that is compared.
"""

import pytest

from megatron.core.fp8.recipes import RECIPES
from tests.functional_tests.cases import find_cases, launch
from tests.functional_tests.golden import collect, compare, find_golden
from tests.functional_tests.run import run_case
from tools.run_metrics import read_golden

MAX_LAUNCHES = 8
CASES = [case for case in find_cases() if case.test_type != "curve"]
NORMAL = [case for case in CASES if case.tier == "normal"]
ONE_PROCESS = "gpt_moe/one_process_fp32"
SPLITS = [
    "gpt_moe/ep2_fp32",
    "gpt_moe/tp2_sp_fp32",
    "gpt_moe/tp2_ep2_fp32",
    "gpt_moe/cp2_ep2_fp32",
    "gpt_moe/ep2_zero_fp32",
]


def by_tier(case):
    return pytest.param(case, marks=[] if case in NORMAL else pytest.mark.full, id=case.name)


@pytest.fixture(scope="session")
def work_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("functional")


@pytest.mark.parametrize("case", [by_tier(case) for case in CASES])
def test_case_equals_its_golden_values(case, work_folder):
    assert run_case(case, work_folder / case.name.replace("/", "-")) == []


def test_normal_tier_launches_few_times():
    assert sum(case.num_launches for case in NORMAL) <= MAX_LAUNCHES


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_curve_ends_within_one_percent_of_bf16(recipe):
    """What was recorded; the launches above show that it still holds."""
    (case,), (bf16,) = find_cases([f"gpt_fp8/{recipe}"]), find_cases(["gpt_fp8/bf16"])
    got, want = (read_golden(find_golden(one.folder))["lm loss"] for one in (case, bf16))
    assert max(got) == max(want) == 30
    assert got[30] == pytest.approx(want[30], rel=0.01)
    assert got != want


def losses(name, folder):
    """The losses of a new run of a case; counts of zeros belong to a layout."""
    (case,) = find_cases([name])
    metrics = collect(launch(case, folder / f"curve-{name.replace('/', '-')}"), case.metrics)
    return {metric: series for metric, series in metrics.items() if "loss" in metric}


@pytest.fixture(scope="session")
def one_process_losses(work_folder):
    return losses(ONE_PROCESS, work_folder)


@pytest.mark.full
@pytest.mark.parametrize("name", SPLITS)
def test_split_run_has_the_curve_of_one_process(name, one_process_losses, work_folder):
    """Within 1e-4 over ten steps and 2e-3 after, where runs of fp32 that sum in another order drift apart."""
    split = losses(name, work_folder)
    assert {"lm loss", "load_balancing_loss", "z_loss"} <= set(split)
    expected = {metric: one_process_losses[metric] for metric in split}
    assert compare(expected, split, is_same_fingerprint=False) == []
