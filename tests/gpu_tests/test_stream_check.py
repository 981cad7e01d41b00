"""The stream checker on real streams: the same rules, by what is current on the device, in backward threads too."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.stream_check.report import report
from megatron.core.stream_check.rules import Kind
from megatron.core.streams import Role
from tests.common.mutants import replaced
from tests.common.overlapped_model import overlapped_model, run_microbatches
from tests.unit_tests.core.pipeline_parallel.overlap.test_faults import on_the_other_stream
from tests.unit_tests.core.stream_check.test_recorder import exchange_on_comm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    torch.cuda.synchronize()
    streams.reset()


def checked_steps(num_steps=2, **options):
    """Two steps under the checker, printed and returned."""
    model = overlapped_model(device="cuda", is_shuffled=True, params_dtype=torch.bfloat16)
    with StreamRecorder() as recorder:
        for _ in range(num_steps):
            run_microbatches(model, **options)
            recorder.finish_step()
    print(report(recorder.findings, 0, recorder.num_operations), recorder.stream_names())
    return recorder


@pytest.mark.parametrize("delays_wgrad", [False, True])
def test_combined_schedule_is_silent_on_real_streams(delays_wgrad):
    recorder = checked_steps(delays_wgrad=delays_wgrad)
    assert recorder.findings == []
    assert set(recorder.clocks.streams) == {Role.COMPUTE, Role.COMM}


def test_weight_gradient_on_the_other_stream_is_found():
    with replaced(StageNode, "weight_grads", on_the_other_stream):
        recorder = checked_steps(1, delays_wgrad=True)
    assert {Kind.WGRAD, Kind.READ} <= {finding.kind for finding in recorder.findings}


def test_missing_wait_is_found():
    with replaced(streams, "wait", lambda event: None), pytest.raises(AssertionError, match="are held"):
        checked_steps(1)


def test_missing_hold_is_found():
    with replaced(streams, "hold", lambda tensor, owner: None):
        recorder = checked_steps(1)
    assert {Kind.FREE, Kind.REUSE} & {finding.kind for finding in recorder.findings}


def test_collectives_of_nccl_run_where_they_are_said_to():
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        assert exchange_on_comm(is_async=False, waits=False, device=device) == []
        assert exchange_on_comm(is_async=True, waits=True, device=device) == []
        (forgotten,) = exchange_on_comm(is_async=True, waits=False, device=device)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    assert "first  c10d.alltoall_base_ on default group" in forgotten
    assert "then   aten.add on compute" in forgotten


def test_stream_without_a_role_is_named_by_its_number():
    side = torch.cuda.Stream()
    with StreamRecorder() as recorder, streams.step(torch.device("cuda")):
        x = torch.ones(4, device="cuda")
        with torch.cuda.stream(side):
            x + 1
    (finding,) = recorder.findings[:1]
    assert (finding.kind, finding.then.stream) == (Kind.READ, f"stream {side.stream_id}")


def test_backward_runs_on_the_stream_of_its_stage():
    with StreamRecorder() as recorder, streams.step(torch.device("cuda")):
        with streams.on(Role.COMM, "F 0.0 stage"):
            weight = torch.ones(4, device="cuda", requires_grad=True)
            loss = (weight * weight).sum()
        with streams.on(Role.COMM, "B 0.0 stage"):
            torch.autograd.backward(loss)
            weight.grad.zero_()
    assert recorder.findings == []


def test_cost_of_a_checked_step_is_printed():
    model = overlapped_model(device="cuda", is_shuffled=True, params_dtype=torch.bfloat16)

    def step_ms():
        begin = time.perf_counter()
        run_microbatches(model)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    plain = min(step_ms() for _ in range(5))
    with StreamRecorder() as recorder:
        checked = min(step_ms() for _ in range(5))
    print(
        f"plain step {plain:.1f} ms, checked {checked:.1f} ms, {checked / plain:.1f} times, {recorder.num_operations}"
    )
    assert checked < 10 * plain
