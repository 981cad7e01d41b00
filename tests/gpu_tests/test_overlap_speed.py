"""Step time of slice A with and without overlap, by the multiprocessors that the exchange has; prints and records.

One rank holds all experts and sends all rows to itself through the kernels of symmetric memory, so that there is more
to hide than between GPUs. Eager: the host is far ahead of the device in this slice.
"""

import statistics

import pytest
import torch

from megatron.core import streams
from megatron.core.fusions.fused_grouped_linear import grouped_linear
from megatron.core.utils.sm_reservation import leaving_sms_free
from megatron.training.callbacks.hidden_share import HiddenShare
from tests.gpu_tests.test_graph_figures import FOLDER, slice_flags, train
from tests.gpu_tests.test_overlap_memory import FLAGS
from tests.gpu_tests.test_overlap_runs import SwitchOn
from tools.benchmark.result import write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIRST_TIMED_STEP = 3
ROOMS = (0, 8, 16, 32)
"""Multiprocessors; 0 leaves none and lets the kernels of the exchange have the whole device."""
ROWS, WIDTH, EXPERT_WIDTH, EXPERTS = 131072, 2048, 1536, 128


class Shares(HiddenShare):
    """Notes the hidden share of each step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_step_end(self, run, result):
        super().on_step_end(run, result)
        self.found.append(run.hidden_share)


def step_ms(capfd, num_sms, switches):
    """Median time of the last steps."""
    streams.reset()
    room = f" --moe-flex-dispatcher-num-sms {num_sms}" if num_sms else ""
    times = train(slice_flags(FLAGS + room), switches, capfd)
    return statistics.median(ms for step, ms in times.items() if step >= FIRST_TIMED_STEP)


def product_tflops(num_sms, repeats=20):
    """A grouped product of the slice's experts beside nothing, with some multiprocessors left free."""
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    weights = list(torch.randn(EXPERTS, EXPERT_WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").unbind(0))
    counts = torch.full((EXPERTS,), ROWS // EXPERTS, dtype=torch.int64, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad(), leaving_sms_free(num_sms):
        for i in range(repeats + 3):
            if i == 3:
                begin.record()
            grouped_linear(rows, weights, counts, None, False)
    end.record()
    torch.cuda.synchronize()
    return 2e-9 * ROWS * WIDTH * EXPERT_WIDTH * repeats / begin.elapsed_time(end)


def test_step_of_slice_a_by_the_room_of_the_exchange(capfd):
    figures = {"product TFLOP/s": {str(n): product_tflops(n) for n in ROOMS}, "off, ms": step_ms(capfd, 0, [])}
    for num_sms in ROOMS:
        shares = Shares()
        ms = step_ms(capfd, num_sms, [SwitchOn(True), shares])
        figures[f"on, {num_sms} SMs"] = {"ms": ms, "hidden": statistics.median(filter(None, shares.found))}
    print(figures)
    write_result(FOLDER / "overlap-A-1gpu.json", figures)
    assert min(figures[f"on, {num_sms} SMs"]["ms"] for num_sms in ROOMS) <= 1.02 * figures["off, ms"]
