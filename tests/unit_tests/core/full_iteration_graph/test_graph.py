"""A captured step: what it refuses, what it leaves alone, how it ends."""

import weakref

import pytest
import torch

from megatron.core import graph_state
from megatron.core.full_iteration_graph import FullIterationGraph, collect_blockers
from megatron.core.full_iteration_graph.checks import CheckedRecording
from megatron.core.full_iteration_graph.graph import CAUSES, explain

CPU = torch.device("cpu")
BATCH = {"x": torch.ones(2)}


@pytest.fixture(autouse=True)
def _forget():
    yield
    graph_state.reset()


class FailingRecording(CheckedRecording):
    """A capture that is broken by the step: its end raises an error of its own."""

    def record(self, call):
        try:
            call()
        finally:
            raise RuntimeError("capture was invalidated")


def graph_of(body, recording=None, watched=None):
    recording = CheckedRecording() if recording is None else recording
    return FullIterationGraph("train", body, [BATCH], recording=recording, device=CPU, watched=watched)


def test_capture_computes_nothing():
    state = torch.zeros(2)
    graph = graph_of(lambda batches: state.add_(batches[0]["x"]))
    graph.capture()
    assert state.tolist() == [0.0, 0.0]
    graph.run([BATCH])
    assert state.tolist() == [1.0, 1.0]


def test_replay_before_the_capture_is_an_error():
    with pytest.raises(AssertionError, match=r"run\(\) before capture\(\)"):
        graph_of(lambda batches: batches[0]["x"]).run([BATCH])


def test_broken_capture_names_the_cause_and_not_its_end():
    def body(batches):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(
        RuntimeError, match=r"graph 'train': capture failed: operation not permitted .*read flags after"
    ):
        graph_of(body, FailingRecording()).capture()
    assert not graph_state.is_capturing()


def test_step_that_fails_in_its_capture_leaves_no_recording():
    class Begun(CheckedRecording):
        is_destroyed = False

        def record(self, call):
            call()

        def destroy(self):
            self.is_destroyed = True

    def body(batches):
        raise ValueError("a step that fails")

    recording = Begun()
    with pytest.raises(ValueError, match="a step that fails"):
        graph_of(body, recording).capture()
    assert recording.is_destroyed


@pytest.mark.parametrize(("words", "cause"), CAUSES)
def test_each_usual_cause_is_explained(words, cause):
    assert explain(f"CUDA error: {words} ...").endswith(cause)


def test_unknown_cause_is_not_guessed():
    assert explain("something else") == ""


def test_captured_memory_that_was_replaced_is_named_before_the_replay():
    param = torch.nn.Parameter(torch.ones(2))
    graph = graph_of(lambda batches: param.detach() * batches[0]["x"], watched={"0.weight": param})
    graph.capture()
    graph.run([BATCH])
    param.data = torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"graph 'train': 0.weight: not where the captured step reads it"):
        graph.run([BATCH])


def test_captured_memory_that_was_given_back_is_named_before_the_replay():
    main_grad = torch.ones(2)
    graph = graph_of(lambda batches: batches[0]["x"] * 2, watched={"main_grad": main_grad})
    graph.capture()
    main_grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="main_grad: not where"):
        graph.run([BATCH])


def test_captured_memory_lives_as_long_as_the_graph():
    owned = {"main_grad": torch.ones(2)}
    graph = graph_of(lambda batches: batches[0]["x"] * 2, watched=owned)
    graph.capture()
    dropped = weakref.ref(owned.pop("main_grad"))
    graph.run([BATCH])
    assert dropped() is not None
    graph.destroy()
    assert dropped() is None


def test_checkpoint_loaded_in_place_passes():
    param = torch.nn.Parameter(torch.ones(2))
    graph = graph_of(lambda batches: param.detach() * batches[0]["x"], watched={"weight": param})
    graph.capture()
    torch.nn.ParameterList([param]).load_state_dict({"0": torch.full((2,), 3.0)})
    assert graph.run([BATCH]).tolist() == [3.0, 3.0]


def test_destroyed_graph_lets_go_of_the_step():
    graph = graph_of(lambda batches: batches[0]["x"])
    graph.capture()
    graph_state.destroy_graphs()
    assert not graph.is_alive
    with pytest.raises(AssertionError, match="before capture"):
        graph.run([BATCH])


class Blocked(torch.nn.Module):
    def graph_capture_blockers(self):
        return ["field=1: reason; remedy."]


def test_blockers_of_a_model_are_listed_once():
    model = torch.nn.Sequential(Blocked(), torch.nn.Linear(1, 1), Blocked())
    assert collect_blockers([model]) == ["field=1: reason; remedy."]
