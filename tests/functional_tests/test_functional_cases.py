"""Every case of this folder is launched through torchrun and compared with its golden values."""

import pytest

from tests.functional_tests.cases import find_cases
from tests.functional_tests.run import run_case

MAX_LAUNCHES = 8
CASES = find_cases()


@pytest.fixture(scope="session")
def work_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("functional")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case_equals_its_golden_values(case, work_folder):
    assert run_case(case, work_folder / case.name.replace("/", "-")) == []


def test_normal_tier_launches_few_times():
    assert sum(case.num_launches for case in CASES) <= MAX_LAUNCHES
