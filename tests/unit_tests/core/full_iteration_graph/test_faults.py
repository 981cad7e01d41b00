"""The combined schedule as a captured step, repeated by the stand-in: bits of the plain one, the four faults found.

On a GPU tests/gpu_tests/test_graph_faults.py replays a real graph of the same step with late kernels.
"""

from contextlib import ExitStack, contextmanager

import pytest

from megatron.core import graph_state, streams
from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.stream_check.rules import Kind
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.captured_step import CapturedStep, plain_gradients
from tests.common.mutants import replaced
from tests.common.overlapped_model import assert_equal_bits, overlapped_model
from tests.common.stream_mutants import ALL_KEPT
from tests.unit_tests.core.pipeline_parallel.overlap.test_faults import (
    LENGTHS,
    inputs_overwritten,
    on_the_other_stream,
    watched_rows,
    without_hold,
)


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    yield
    graph_state.reset()
    streams.reset()


@contextmanager
def found_in(recorded):
    """The stream checker's findings in the block, as kinds, in `recorded`."""
    with StreamRecorder() as recorder:
        yield
        recorder.finish_step()
    recorded.extend(finding.kind for finding in recorder.findings)


MODELS = {"rows": {}, "shuffled": {"is_shuffled": True}, "bytes": {"shadow": True, "counts_late": True}}


@pytest.mark.parametrize("delays_wgrad", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("kind", MODELS)
def test_captured_overlap_gives_the_bits_of_the_plain_schedule(kind, delays_wgrad):
    model = overlapped_model(bf16=True, **MODELS[kind])
    plain = [plain_gradients(model, LENGTHS, seed) for seed in (3, 7)]
    with inputs_overwritten():
        step = CapturedStep(model, LENGTHS, delays_wgrad=delays_wgrad)
        for seed, expected in zip((3, 7), plain, strict=True):
            assert_equal_bits(expected, step.run(seed))


def test_replays_are_in_order():
    step, found = (
        CapturedStep(overlapped_model(bf16=True, shadow=True, counts_late=True), LENGTHS, delays_wgrad=True),
        [],
    )
    for seed in range(2):
        with found_in(found):
            step.run(seed)
    assert found == []


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "kind"),
    [
        (StageNode, "weight_grads", on_the_other_stream, Kind.READ),
        (LayerPlan, "close", without_hold, Kind.FREE),
    ],
    ids=["f1", "f3"],
)
def test_fault_that_is_captured_is_found_in_its_replay(owner, name, mutant, kind):
    found = []
    with replaced(owner, name, mutant):
        step = CapturedStep(overlapped_model(bf16=True, shadow=True, counts_late=True), LENGTHS, delays_wgrad=True)
        with found_in(found):
            step.run()
    assert kind in found


def test_f2_undone_keeps_rows_in_a_replay():
    fates = {}
    for name, keeps in {"fixed": [], "undone": [(MoELayer, "saved_inputs", keeps_rows)]}.items():
        with ExitStack() as stack:
            for seam in keeps:
                stack.enter_context(replaced(*seam))
            step = CapturedStep(overlapped_model(bf16=True, shadow=True), LENGTHS)
            with watched_rows() as seen:
                step.run()
        fates[name] = set(seen)
    assert fates == {"fixed": {"gone"}, "undone": {"kept"}}


def keeps_rows(self):
    return ALL_KEPT


def test_f4_undone_destroys_gradients_of_a_replay():
    model = overlapped_model(bf16=True)
    plain = plain_gradients(model, LENGTHS, 3)
    with replaced(MoELayer, "saved_inputs", lambda self: frozenset()), inputs_overwritten():
        got = CapturedStep(model, LENGTHS).run(3)
    with pytest.raises(AssertionError, match=r"gradients differ: .*linear_fc1"):
        assert_equal_bits(plain, got)
