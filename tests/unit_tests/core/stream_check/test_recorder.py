"""Tiny two-stream programs for each rule: the fault is found, and its clean twin is silent."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import streams
from megatron.core.deferred_wgrad import WgradQueue
from megatron.core.errors import StreamOrderError
from megatron.core.stream_check import collectives
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.stream_check.report import finding_text
from megatron.core.stream_check.rules import Kind
from megatron.core.streams import Role

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    streams.reset()


@contextlib.contextmanager
def recorded_step(device=CPU):
    """A recorder around one step, which is judged at its end."""
    with StreamRecorder() as recorder:
        with streams.step(device):
            yield recorder
        recorder.finish_step()


def kinds(recorder):
    return [finding.kind for finding in recorder.findings]


def produced_on_comm():
    """A tensor that comm writes, and the event behind it."""
    with streams.on(Role.COMM, "F0.1 dispatch"):
        x = torch.ones(2, 2) * 2
        return x, streams.record()


def test_read_without_wait_names_both_streams_stages_and_lines():
    with recorded_step() as recorder:
        x, _ = produced_on_comm()
        with streams.on(Role.COMPUTE, "F0.1 experts"):
            x + 1
        streams.hold(x, Role.COMM)
        del x
    (finding,) = recorder.findings
    lines = finding_text(finding).splitlines()
    assert lines[0] == "read without order: tensor float32 [2, 2] of aten.mul"
    assert lines[1].startswith("  first  aten.mul on comm in F0.1 dispatch at tests/unit_tests/core/stream_check/")
    assert " produced_on_comm < " in lines[1]
    assert lines[2].startswith("  then   aten.add on compute in F0.1 experts at tests/unit_tests/core/stream_check/")
    assert lines[3] == "  compute has not waited for comm"


def test_read_behind_the_wait_is_silent():
    with recorded_step() as recorder:
        x, event = produced_on_comm()
        streams.wait(event)
        x + 1
        streams.hold(x, Role.COMM)
        with streams.on(Role.COMM):
            streams.hold(x, Role.COMM)
            event = None
        done = streams.record()
        with streams.on(Role.COMM):
            streams.wait(done)
        del x
    assert recorder.findings == []


def test_event_recorded_before_the_write_is_named():
    with recorded_step() as recorder:
        with streams.on(Role.COMM):
            early = streams.record()
            x = torch.ones(4)
        streams.wait(early)
        x + 1
        streams.hold(x, Role.COMM)
        del x
    (finding,) = recorder.findings
    assert finding.kind is Kind.READ
    assert finding.remedy.startswith("the last event of comm that compute waited for was recorded before it, at tests/")


def test_write_while_another_stream_reads_is_found():
    with recorded_step() as recorder:
        x = torch.ones(4)
        ready = streams.record()
        with streams.on(Role.COMM):
            streams.wait(ready)
            x + 1
            done = streams.record()
        x.zero_()
        streams.wait(done)
    assert kinds(recorder) == [Kind.WRITE]


def test_write_behind_the_reader_is_silent():
    with recorded_step() as recorder:
        x = torch.ones(4)
        ready = streams.record()
        with streams.on(Role.COMM):
            streams.wait(ready)
            x + 1
            done = streams.record()
        streams.wait(done)
        x.zero_()
    assert recorder.findings == []


def read_on_comm(x):
    ready = streams.record()
    with streams.on(Role.COMM, "B0.2 dispatch"):
        streams.wait(ready)
        x + 1


def test_freed_while_another_stream_reads_is_found():
    with recorded_step() as recorder:
        x = torch.ones(4)
        read_on_comm(x)
        del x
    (finding,) = recorder.findings
    assert finding.kind is Kind.FREE
    assert (finding.first.name, finding.then.name) == ("aten.add", "free")


def test_memory_handed_out_again_too_early_names_the_new_owner():
    with recorded_step() as recorder:
        x = torch.ones(4)
        read_on_comm(x)
        del x
        torch.zeros(3)
    (finding,) = recorder.findings
    assert finding.kind is Kind.REUSE
    assert finding.first.stage == "B0.2 dispatch"
    assert finding.then.name == "aten.zeros"


def test_held_tensor_is_silent():
    with recorded_step() as recorder:
        x = torch.ones(4)
        read_on_comm(x)
        with streams.on(Role.COMM):
            streams.hold(x, Role.COMPUTE)
        del x
        torch.zeros(4)
    assert recorder.findings == []


def test_first_use_on_another_stream_must_be_behind_the_allocation():
    with recorded_step() as recorder:
        buffer = torch.empty(4)
        with streams.on(Role.COMM):
            buffer.fill_(1.0)
            streams.hold(buffer, Role.COMPUTE)
    (finding,) = recorder.findings
    assert (finding.kind, finding.first.name) == (Kind.WRITE, "aten.empty")


def test_storage_emptied_without_waiting_is_found():
    with recorded_step() as recorder:
        x = torch.ones(4)
        read_on_comm(x)
        streams.empty_storage(x)
    (finding,) = recorder.findings
    assert (finding.kind, finding.then.name) == (Kind.FREE, "release")


def test_storage_emptied_by_retirement_is_silent():
    with recorded_step() as recorder:
        x = torch.ones(4)
        read_on_comm(x)
        with streams.on(Role.COMM):
            streams.release(x, Role.COMPUTE)
    assert recorder.findings == []


def test_use_after_release_stops_the_program_with_both_lines():
    with recorded_step() as recorder:
        x = torch.ones(4)
        streams.release(x, Role.COMPUTE)
        with pytest.raises(StreamOrderError, match=r"tensor float32 \[4\] of aten.ones is used by aten.add at tests/"):
            x + 1
    assert kinds(recorder) == [Kind.RELEASED]


def test_one_event_for_two_streams_is_found():
    with recorded_step() as recorder:
        event = streams.record()
        with streams.on(Role.COMM):
            object.__setattr__(event, "role", Role.COMM)
            recorder.on_record(event)
    assert kinds(recorder) == [Kind.EVENT]


def let_go_in_backward(*, is_used):
    """A stage on compute keeps what comm made until its backward, which uses it or does not."""
    with recorded_step() as recorder:
        x, event = produced_on_comm()
        with streams.on(Role.COMPUTE, "F 0.1 experts"):
            streams.wait(event)
            x + 1
        with streams.on(Role.COMPUTE, "B 0.1 experts"):
            if is_used:
                x * 2
        with streams.on(Role.COMPUTE, "W 0.1 experts"):
            streams.hold(x, Role.COMM)
    return recorder


def test_input_kept_for_a_backward_that_does_not_use_it_is_found():
    (finding,) = let_go_in_backward(is_used=False).findings
    assert (finding.kind, finding.first.stage, finding.then.stage) == (Kind.LEAK, "F 0.1 experts", "W 0.1 experts")


def test_input_kept_for_its_backward_is_silent():
    assert let_go_in_backward(is_used=True).findings == []


def flush_on(role):
    """A weight gradient put off on compute and computed on `role`."""
    queue = WgradQueue()
    with recorded_step() as recorder:
        with streams.on(Role.COMPUTE, "B 0.1 experts"):
            queue.put([], lambda: None)
        with streams.on(role, "W 0.1 experts"):
            queue.flush()
    return recorder


def test_weight_gradient_on_another_stream_is_found():
    (finding,) = flush_on(Role.COMM).findings
    lines = finding_text(finding).splitlines()
    assert lines[0] == "weight gradient outside its stage's stream"
    assert lines[1].startswith("  first  put off on compute in B 0.1 experts at megatron/core/deferred_wgrad.py")
    assert lines[2].startswith("  then   taken up on comm in W 0.1 experts at megatron/core/deferred_wgrad.py")


def test_weight_gradient_on_its_stream_is_silent():
    assert flush_on(Role.COMPUTE).findings == []


def test_buffer_that_outlives_the_step_belongs_to_compute():
    with recorded_step() as recorder:
        with streams.on(Role.COMM):
            wrong = torch.zeros(4)
        right = torch.zeros(4)
        recorder.name({"layer.weight main_grad": wrong, "layer.bias main_grad": right})
    (finding,) = recorder.findings
    assert finding.kind is Kind.OWNER
    assert finding.tensor == "layer.weight main_grad float32 [4]"


def test_tensor_that_a_whole_step_did_not_use_is_a_leak():
    kept = []
    with StreamRecorder() as recorder:
        used = torch.ones(4)
        for step in range(2):
            used.add_(1)
            if step == 0:
                kept.append(torch.ones(3))
            recorder.finish_step()
    (finding,) = recorder.findings
    assert (finding.kind, finding.tensor) == (Kind.LEAK, "tensor float32 [3] of aten.ones")


def test_declared_kernel_is_seen():
    with recorded_step() as recorder:
        x, _ = produced_on_comm()
        y = torch.zeros(2, 2)
        streams.declare("triton.scale_rows", reads=[x], writes=[y])
        streams.hold(x, Role.COMM)
    (finding,) = recorder.findings
    assert finding.then.name == "triton.scale_rows"


def test_backward_is_seen():
    with recorded_step() as recorder:
        weight = torch.ones(4, requires_grad=True)
        loss = (weight * weight).sum()
        with streams.on(Role.COMM, "B0.1 experts"):
            torch.autograd.backward(loss)
    finding = recorder.findings[0]
    assert finding.kind is Kind.READ
    assert finding.then.stage == "B0.1 experts"
    assert "test_backward_is_seen" in finding_text(finding)


@pytest.fixture
def lonely_world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_result_of_a_collective_must_be_waited_for(lonely_world):
    with recorded_step() as recorder:
        x = torch.ones(4)
        handle = dist.all_reduce(x, async_op=True)
        x + 1
        handle.wait()
        x + 1
    (finding,) = recorder.findings
    assert (finding.kind, finding.first.name, finding.then.name) == (Kind.READ, "c10d.allreduce_", "aten.add")


def test_wait_of_a_collective_orders_the_stream_that_calls_it(lonely_world):
    with recorded_step() as recorder:
        x = torch.ones(4)
        ready = streams.record()
        with streams.on(Role.COMM):
            streams.wait(ready)
            dist.all_reduce(x)
            streams.hold(x, Role.COMPUTE)
        x + 1
    (finding,) = recorder.findings
    assert finding.first.name == "c10d.allreduce_"
    assert (finding.first.stream, finding.then.stream) == (Role.COMM, Role.COMPUTE)


def exchange_on_comm(is_async, waits, device=CPU):
    """Rows that comm exchanges between ranks and compute reads behind the event of comm; the report of it."""
    with recorded_step(device) as recorder:
        sent, received = torch.ones(4, device=device) * 2, torch.empty(4, device=device)
        ready = streams.record()
        with streams.on(Role.COMM, "F 0.1 dispatch"):
            streams.wait(ready)
            handle = dist.all_to_all_single(received, sent, async_op=is_async)
            if handle is not None and waits:
                handle.wait()
            streams.hold(sent, Role.COMPUTE)
            streams.hold(received, Role.COMPUTE)
            arrived = streams.record()
        streams.wait(arrived)
        received + 1
    return [finding_text(finding) for finding in recorder.findings]


def test_collective_that_is_not_asynchronous_runs_on_the_stream_that_calls(lonely_world, monkeypatch):
    assert exchange_on_comm(is_async=False, waits=False) == []
    monkeypatch.setattr(collectives, "_handle_in", lambda result: None)  # NCCL has none to give
    monkeypatch.setattr(dist.Work, "wait", lambda handle, timeout=None: True)  # and nobody waits
    assert exchange_on_comm(is_async=False, waits=False) == []


def test_asynchronous_collective_is_behind_nobody_who_does_not_wait(lonely_world):
    assert exchange_on_comm(is_async=True, waits=True) == []
    first, *more = exchange_on_comm(is_async=True, waits=False)
    assert more == []
    assert "first  c10d.alltoall_base_ on default group in F 0.1 dispatch" in first
    assert "then   aten.add on compute" in first
    assert first.endswith("compute has not waited for default group")


@pytest.mark.parametrize("waits", [True, False])
def test_handle_of_a_batch_stands_for_its_messages(monkeypatch, waits):
    monkeypatch.setattr(collectives, "_handle_in", lambda result: None)  # as NCCL does in a batch
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with recorded_step() as recorder:
            x = torch.ones(4)
            batch = dist.isend(x, 1)
            if waits:
                dist.Work.wait(batch)  # the fake has a class of its own
            x.add_(1)
    finally:
        dist.destroy_process_group()
    assert kinds(recorder) == ([] if waits else [Kind.WRITE])


def test_collective_that_nobody_waits_for_is_found(lonely_world):
    with StreamRecorder() as recorder:
        x = torch.ones(4)
        handle = dist.all_reduce(x, async_op=True)
        recorder.finish_step()
        assert recorder.findings == []
        recorder.finish_step()
        handle.wait()
    assert Kind.UNWAITED in kinds(recorder)


def test_stream_that_is_not_joined_is_found(monkeypatch):
    monkeypatch.setattr(streams, "join", lambda: None)
    with recorded_step() as recorder, streams.on(Role.COMM):
        torch.ones(4)
    (finding,) = recorder.findings
    assert finding_text(finding) == "stream not joined: comm\n  let compute wait for comm at the end of the step"


def test_recorder_leaves_torch_as_it_was():
    before = dist.Work.wait
    with StreamRecorder():
        assert dist.Work.wait is not before
    assert dist.Work.wait is before


def test_handle_keeps_its_tensors_until_it_is_waited_for(lonely_world):
    with recorded_step() as recorder:
        output = torch.empty(4)
        handle = dist.all_to_all_single(output, torch.ones(4), async_op=True)
        torch.zeros(4)
        handle.wait()
    assert recorder.findings == []
