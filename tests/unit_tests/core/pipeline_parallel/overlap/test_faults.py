"""Four faults that appear where dispatch, overlap, delayed weight gradients and low precision meet.

F1  a delayed weight gradient runs outside the stream of its stage
F2  rows of the experts stay until backward although what backward reads is a copy
F3  metadata of one microbatch is freed or overwritten while another stream, or a later pass, still reads it
F4  rows of the experts are freed although backward reads them

Each is held by tests that pass, and fail when the fix is undone. Undoing it is a mutant: a replaced function.
"""

import weakref
from contextlib import ExitStack, contextmanager

import pytest

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.layer_plan import LayerPlan
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from megatron.core.pipeline_parallel.overlap.protocol import Stage
from megatron.core.stream_check.recorder import StreamRecorder
from megatron.core.stream_check.rules import Kind
from megatron.core.transformer.moe.moe_layer import MoELayer
from tests.common.local_exchange import LocalExchangeDispatcher
from tests.common.mutants import replaced
from tests.common.overlapped_model import assert_equal_bits, overlapped_model, run_microbatches
from tests.common.poison import fill_with_poison
from tests.common.stream_mutants import ALL_KEPT


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    streams.reset()


def findings_of(model, **options):
    """What the stream checker reports about one step."""
    with StreamRecorder() as recorder:
        run_microbatches(model, **options)
        recorder.finish_step()
    return [finding.kind for finding in recorder.findings]


# F1


def on_the_other_stream(self):
    """Mutant: the weight gradients of a node on a stream that is not its own."""
    waiting = len(self.queue or ())
    with streams.on(self.role.other):
        if self.queue:
            self.queue.flush()
    return waiting


def test_delayed_weight_gradients_are_in_order():
    assert findings_of(overlapped_model(), delays_wgrad=True) == []


def test_f1_undone_is_found():
    with replaced(StageNode, "weight_grads", on_the_other_stream):
        assert Kind.READ in findings_of(overlapped_model(), delays_wgrad=True)


# F2 and F4: what becomes of the experts' rows


@contextmanager
def watched_rows():
    """Note for each dispatch whether its rows live right after the experts' forward; yields the list."""
    fates, forward = [], LayerPlan.forward

    def watched(self, stage):
        if stage is Stage.EXPERTS:
            reference = weakref.ref(self._values["rows"].tensor.untyped_storage())
        forward(self, stage)
        if stage is Stage.EXPERTS:
            self.rows_are_alive = lambda: reference() is not None
        if stage is Stage.COMBINE:  # the stream of the exchange, which owns the rows, has waited for the experts
            fates.append("kept" if self.rows_are_alive() else "gone")

    with replaced(LayerPlan, "forward", watched):
        yield fates


def fates_of(**model):
    with watched_rows() as fates:
        run_microbatches(overlapped_model(**model))
    return set(fates)


FP8 = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}


@pytest.mark.parametrize(
    ("model", "fate"),
    [
        ({"is_shuffled": False}, "kept"),
        ({"is_shuffled": True}, "gone"),
        ({"is_shuffled": False, "shadow": True}, "gone"),
        ({"is_shuffled": False, "moe_grouped_gemm": False}, "kept"),
        ({"is_shuffled": False, **FP8}, "gone"),
    ],
    ids=["saved as they are", "sorted into a copy", "saved as bytes", "sequential", "saved as FP8 codes"],
)
def test_rows_of_the_experts_go_exactly_if_autograd_did_not_save_them(model, fate):
    assert fates_of(**model) == {fate}


def test_f2_undone_keeps_rows_of_which_bytes_were_saved():
    """Mutant: the layer claims that its experts keep whatever they are given."""
    with replaced(MoELayer, "saved_inputs", lambda self: ALL_KEPT):
        assert fates_of(is_shuffled=False, shadow=True) == {"kept"}


@contextmanager
def inputs_overwritten():
    """Fill memory of the other stream with NaN where forward would only stop holding it."""
    hold = streams.hold

    def release(tensor, owner):
        is_input = streams.current_label().startswith("F ") and owner is not streams.current_role()
        (streams.release if is_input else hold)(tensor, owner)

    with ExitStack() as stack:
        stack.enter_context(replaced(streams, "hold", release))
        stack.enter_context(replaced(streams, "empty_storage", fill_with_poison))
        yield


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("shadow", [False, True], ids=["rows", "bytes"])
def test_what_is_let_go_is_read_by_nobody(is_shuffled, shadow):
    expected = run_microbatches(overlapped_model(is_shuffled, shadow=shadow), overlap=False)
    with inputs_overwritten():
        got = run_microbatches(overlapped_model(is_shuffled, shadow=shadow), delays_wgrad=True)
    assert_equal_bits(expected, got)


def test_f4_undone_destroys_gradients():
    """Mutant: the rows of the experts are released whoever saved them."""
    model = overlapped_model(is_shuffled=False)
    expected = run_microbatches(model, overlap=False)
    with replaced(MoELayer, "saved_inputs", lambda self: frozenset()), inputs_overwritten():
        got = run_microbatches(model)
    with pytest.raises(AssertionError, match=r"gradients differ: .*linear_fc1"):
        assert_equal_bits(expected, got)


# F3

LENGTHS = [8, 5, 7]  # so that row counts of microbatches differ


@contextmanager
def watched_counts():
    """References to the row counts of every layer and microbatch; yields (alive after forward, alive in backward)."""
    references, seen = {}, {"after forward": [], "in backward": []}
    forward, backward = LayerPlan.forward, LayerPlan.backward

    def watched_forward(self, stage):
        forward(self, stage)
        if stage is Stage.DISPATCH:
            references[id(self)] = weakref.ref(self.call.dispatch_state.tokens_per_expert.untyped_storage())
        if stage is Stage.POST:
            seen["after forward"].append(references[id(self)]() is not None)

    def watched_backward(self, stage):
        backward(self, stage)
        if stage is Stage.PRE_DISPATCH:
            seen["in backward"].append(references[id(self)]() is not None)

    with replaced(LayerPlan, "forward", watched_forward), replaced(LayerPlan, "backward", watched_backward):
        yield seen
    seen["after the step"] = [reference() is not None for reference in references.values()]


def test_counts_live_until_the_last_product_of_their_layer():
    with watched_counts() as seen:
        run_microbatches(overlapped_model(counts_late=True), lengths=LENGTHS, delays_wgrad=True)
    assert {name: set(values) for name, values in seen.items()} == {
        "after forward": {True},
        "in backward": {True},
        "after the step": {False},
    }


def test_counts_made_beside_the_exchange_are_in_order():
    model = overlapped_model(counts_late=True, shadow=True)
    assert findings_of(model, lengths=LENGTHS, delays_wgrad=True) == []


def test_microbatches_in_flight_keep_their_own_counts():
    model = overlapped_model(counts_late=True, shadow=True)
    expected = run_microbatches(model, lengths=LENGTHS, overlap=False)
    assert_equal_bits(expected, run_microbatches(model, lengths=LENGTHS))


def counts_on_the_dispatcher(dispatch):
    """Mutant: one buffer for the counts of all microbatches, overwritten by each dispatch."""

    def overwriting(self, rows, probs, state):
        result = dispatch(self, rows, probs, state)
        buffer = vars(self).setdefault("counts", state.tokens_per_expert)
        buffer.data.copy_(state.tokens_per_expert)
        state.tokens_per_expert = buffer
        return result

    return overwriting


def test_f3_undone_mixes_microbatches():
    model = overlapped_model(counts_late=True, shadow=True)
    expected = run_microbatches(model, lengths=LENGTHS, overlap=False)
    mutant = counts_on_the_dispatcher(LocalExchangeDispatcher.token_dispatch)
    with replaced(LocalExchangeDispatcher, "token_dispatch", mutant):
        got = run_microbatches(model, lengths=LENGTHS)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_equal_bits(expected, got)


def without_hold(self):
    """Mutant: metadata is dropped as soon as the host needs it no longer."""
    self._metadata, self.call.dispatch_state = {}, None
    self._nodes.clear()


def test_f3_undone_frees_counts_that_a_stream_is_still_to_read():
    with replaced(LayerPlan, "close", without_hold):
        found = findings_of(overlapped_model(counts_late=True, shadow=True), lengths=LENGTHS, delays_wgrad=True)
    assert Kind.FREE in found
