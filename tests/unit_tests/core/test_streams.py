"""Hand-over between virtual streams: clocks, holding, retirement, release."""

import weakref

import pytest
import torch

from megatron.core import streams
from megatron.core.streams import Role

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    streams.reset()


class Notes:
    """An observer that writes everything down."""

    def __init__(self):
        self.lines = []

    def on_switch(self, role, label):
        self.lines.append(f"switch {role.value} {label}".strip())

    def on_record(self, event):
        self.lines.append(f"record {event.role.value}")

    def on_wait(self, role, event):
        self.lines.append(f"{role.value} waits for {event.role.value}")

    def on_hold(self, tensor, owner, user):
        self.lines.append(f"hold {owner.value} {user.value}")

    def on_retire(self, tensor, owner, user):
        self.lines.append(f"retire {owner.value} {user.value}")

    def on_release(self, tensor):
        self.lines.append("release")


def _used_on_comm(*, then):
    """A tensor of compute whose last use is on comm, given to `then`; returns the tensor."""
    tensor = torch.ones(4)
    with streams.on(Role.COMM):
        then(tensor, Role.COMPUTE)
    return tensor


def test_held_tensor_lives_until_its_owner_has_waited():
    with streams.step(CPU):
        alive = weakref.ref(_used_on_comm(then=streams.hold))
        with streams.on(Role.COMM):
            event = streams.record()
        assert alive() is not None
        streams.wait(event)
        assert alive() is None


def test_event_recorded_before_the_last_use_retires_nothing():
    with streams.step(CPU):
        with streams.on(Role.COMM):
            early = streams.record()
        _used_on_comm(then=streams.hold)
        streams.wait(early)
        assert streams.num_held() == 1


def test_order_passes_through_a_third_event():
    with streams.step(CPU):
        with streams.on(Role.COMM):
            streams.hold(torch.ones(1), Role.COMPUTE)
            first = streams.record()
        streams.wait(first)
        event = streams.record()
        with streams.on(Role.COMM):
            streams.wait(event)
        assert event.clock == {Role.COMPUTE: 1, Role.COMM: 1}


def test_release_empties_the_storage_only_after_the_wait():
    with streams.step(CPU):
        tensor = _used_on_comm(then=streams.release)
        assert tensor.untyped_storage().nbytes() == 16
        with streams.on(Role.COMM):
            event = streams.record()
        streams.wait(event)
        assert tensor.untyped_storage().nbytes() == 0


def test_owner_releases_its_own_memory_at_once():
    with streams.step(CPU), streams.on(Role.COMM):
        tensor = torch.ones(4)
        streams.release(tensor, Role.COMM)
        assert tensor.untyped_storage().nbytes() == 0


def test_end_of_a_step_joins_both_streams_and_lets_go():
    notes = Notes()
    with streams.step(CPU):
        _used_on_comm(then=streams.hold)
        with streams.on(Role.COMPUTE):
            streams.hold(torch.ones(1), Role.COMM)
        streams.set_observer(notes)
    waits = [line for line in notes.lines if "waits" in line]
    assert waits == ["comm waits for compute", "compute waits for comm"]
    assert [line for line in notes.lines if line.startswith("retire")] == ["retire comm compute", "retire compute comm"]
    assert streams.num_held() == 0


def test_observer_sees_every_act_in_order():
    notes = Notes()
    with streams.step(CPU):
        streams.set_observer(notes)
        with streams.on(Role.COMM, "F0.1 dispatch"):
            streams.release(torch.ones(1), Role.COMPUTE)
            event = streams.record()
        streams.wait(event)
        streams.set_observer(None)
    assert notes.lines == [
        "switch comm F0.1 dispatch",
        "hold compute comm",
        "record comm",
        "switch compute",
        "compute waits for comm",
        "retire compute comm",
        "release",
    ]


def test_without_a_step_there_is_one_stream():
    tensor = torch.ones(4)
    with streams.on(Role.COMM):
        assert streams.current_role() is Role.COMPUTE
        streams.hold(tensor, Role.COMPUTE)
    assert streams.num_held() == 0


def test_step_inside_a_step_is_refused():
    with streams.step(CPU), pytest.raises(AssertionError, match="a step inside a step"), streams.step(CPU):
        pass


def test_failed_step_leaves_nothing_behind():
    def failing_step():
        with streams.step(CPU):
            _used_on_comm(then=streams.hold)
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        failing_step()
    assert (streams.num_held(), streams.is_active()) == (0, False)
