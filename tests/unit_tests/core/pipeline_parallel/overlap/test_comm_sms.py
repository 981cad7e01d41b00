"""Room on the device for the exchange: products of the experts beside one leave it, all others do not."""

from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from tests.common.mutants import replaced
from tests.common.overlapped_model import overlapped_model, run_microbatches

reserved = torch._C._get_sm_carveout_experimental


def reserved_by_stage(has_device, **fields):
    """What is reserved while a stage runs, by the kind of its run, microbatch and name."""
    seen, model = defaultdict(set), overlapped_model(moe_flex_dispatcher_num_sms=8, **fields)
    with ExitStack() as stack:
        for kind in ("forward", "backward", "weight_grads"):
            plain = getattr(StageNode, kind)

            def noted(self, *args, _kind=kind, _plain=plain, **options):
                words = self.name.split()
                seen[_kind, int(words[0].split(".")[1]), words[-1]].add(reserved())
                return _plain(self, *args, **options)

            stack.enter_context(replaced(StageNode, kind, noted))
        if has_device:
            stack.enter_context(replaced(streams, "native_stream", lambda role: object()))
        run_microbatches(model, delays_wgrad=True)
    streams.reset()
    return seen


@pytest.mark.parametrize(("has_device", "room"), [(True, 8), (False, None)])
def test_experts_beside_an_exchange_and_nothing_else_leave_room_on_a_device(has_device, room):
    seen = reserved_by_stage(has_device)
    last = max(microbatch for _, microbatch, _ in seen)
    experts = {key for key in seen if key[2] == "experts"}
    assert {kind for kind, _, _ in experts} == {"forward", "backward", "weight_grads"}
    # The first forward and the last backward have no other microbatch beside them.
    alone = {("forward", 0, "experts"), ("backward", last, "experts"), ("weight_grads", last, "experts")}
    assert alone < experts
    assert all(seen[key] == {None if key in alone else room} for key in experts)
    assert all(values == {None} for key, values in seen.items() if key not in experts)
    assert reserved() is None


def test_experts_beside_a_dense_layer_leave_no_room():
    seen = reserved_by_stage(True, num_layers=2, moe_layer_freq=[1, 0])
    assert {key for key in seen if key[2] == "experts"}
    assert all(values == {None} for values in seen.values())
