"""What watching a step costs."""

import time

import pytest

from megatron.core import streams
from megatron.core.stream_check.recorder import StreamRecorder
from tests.common.overlapped_model import overlapped_model, run_microbatches


def step_seconds(model):
    begin = time.process_time()
    run_microbatches(model, delays_wgrad=True)
    return time.process_time() - begin


@pytest.mark.full
def test_checked_step_costs_at_most_ten_times_a_plain_one():
    model = overlapped_model(is_shuffled=True, hidden_size=64, moe_ffn_hidden_size=64)
    plain = min(step_seconds(model) for _ in range(5))
    with StreamRecorder() as recorder:
        checked = min(step_seconds(model) for _ in range(5))
    streams.reset()
    print(f"plain {1e3 * plain:.1f} ms, checked {1e3 * checked:.1f} ms, {checked / plain:.2f} times")
    assert recorder.findings == []
    assert checked <= 10 * plain
