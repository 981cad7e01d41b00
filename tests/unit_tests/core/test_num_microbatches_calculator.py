"""Batch sizes as a function of consumed samples, against literals."""

import pytest

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator, build_batch_size_law


@pytest.fixture(autouse=True)
def _forget_calculator():
    calculator.reset()
    yield
    calculator.reset()


def table(consumed: int, steps: int) -> list[tuple[int, int, int]]:
    """(batch, microbatches, consumed afterwards) of the next steps."""
    rows = []
    for _ in range(steps):
        calculator.update_num_microbatches(consumed)
        consumed += calculator.get_current_global_batch_size()
        rows.append((calculator.get_current_global_batch_size(), calculator.get_num_microbatches(), consumed))
    return rows


def test_constant_size_gives_the_quotient():
    calculator.init_num_microbatches_calculator(0, None, 24, 2, 3)
    assert (calculator.get_num_microbatches(), calculator.get_current_global_batch_size()) == (4, 24)
    assert calculator.update_num_microbatches(10**9) is False
    assert calculator.get_micro_batch_size() == 2


STEP_ROWS = [(4, 4, 4), (4, 4, 8), (4, 4, 12), (4, 4, 16), (4, 4, 20), (4, 4, 24), (8, 8, 32), (8, 8, 40)]


@pytest.mark.parametrize("done", [0, 4])
def test_step_schedule_changes_at_the_threshold_and_resumes_alike(done):
    calculator.init_num_microbatches_calculator(0, None, None, 1, 1, step_batch_size_schedule="0:4 24:8", seq_length=1)
    assert table(consumed=4 * done, steps=8 - done) == STEP_ROWS[done:]


def test_step_schedule_divides_tokens_by_the_sequence_length():
    law = build_batch_size_law(None, None, "0:4, 4K:8", 500)
    assert [law.batch_size(n) for n in (0, 7, 8, 100)] == [4, 4, 8, 8]


def test_rampup_follows_the_historic_law():
    calculator.init_num_microbatches_calculator(0, [4, 4, 24], 16, 2, 2)
    sizes = {}
    for consumed in (0, 7, 8, 15, 16, 23, 24, 25, 400):
        calculator.update_num_microbatches(consumed)
        sizes[consumed] = calculator.get_current_global_batch_size()
    assert sizes == {0: 4, 7: 4, 8: 8, 15: 8, 16: 12, 23: 12, 24: 16, 25: 16, 400: 16}


def test_rampup_border_is_exact_where_the_step_is_no_whole_number():
    law = build_batch_size_law([2, 2, 10], 8)
    assert [law.batch_size(n) for n in (0, 3, 4, 6, 7, 9, 10, 11)] == [2, 2, 4, 4, 6, 6, 8, 8]


def test_change_of_size_is_reported_once():
    calculator.init_num_microbatches_calculator(0, None, None, 1, 1, step_batch_size_schedule="0:4 8:8", seq_length=1)
    assert [calculator.update_num_microbatches(n) for n in (0, 4, 8, 16)] == [False, False, True, False]


REFUSED = [
    ({"step": "0:4 26:8"}, r"'0:4 26:8': threshold 26 tokens .* batch size 4"),
    ({"step": "0:4 24:8", "seq": 5}, r"threshold 24 tokens is no whole number of samples"),
    ({"step": "4:4"}, r"first threshold is 4, it must be 0"),
    ({"step": "0:4 8:8 8:2"}, r"threshold 8 does not rise above 8"),
    ({"step": "0:4 x:8"}, r"'x' is no count"),
    ({"step": "0:4 8"}, r"'8' is no 'threshold:batch' pair"),
    ({"step": "  "}, r"is empty"),
    ({"step": "0:4", "gbs": 8}, r"step_batch_size_schedule='0:4' with global_batch_size=8"),
    ({"ramp": [4, 5, 10], "gbs": 16}, r"\[4, 5, 10\] with global_batch_size=16: the difference 12 .* increment 5"),
    ({"ramp": [4, 4], "gbs": 16}, r"takes three integers"),
    ({}, r"global_batch_size=None"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_contradicting_sizes_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        build_batch_size_law(given.get("ramp"), given.get("gbs"), given.get("step"), given.get("seq", 1))


def test_batch_that_does_not_divide_names_all_three_sizes():
    with pytest.raises(ConfigError, match=r"global_batch_size=10: .* micro_batch_size 2 \* data_parallel_size 2 = 4"):
        NumMicroBatchesCalculator(build_batch_size_law(None, 10), 2, 2)


def test_every_size_of_a_ramp_must_divide():
    with pytest.raises(ConfigError, match=r"global_batch_size=6: .* = 4"):
        NumMicroBatchesCalculator(build_batch_size_law([4, 2, 100], 8), 2, 2)


def test_getter_before_init_says_what_to_call():
    with pytest.raises(RuntimeError, match="call init_num_microbatches_calculator"):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(0, None, 4, 1, 1)
    with pytest.raises(RuntimeError, match="exists already"):
        calculator.init_num_microbatches_calculator(0, None, 4, 1, 1)
