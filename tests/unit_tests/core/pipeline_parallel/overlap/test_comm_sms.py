"""Room on the device for the exchange: products of the experts leave it, all others do not."""

from collections import defaultdict
from contextlib import ExitStack

import pytest
import torch

from megatron.core import streams
from megatron.core.pipeline_parallel.overlap.nodes import StageNode
from tests.common.mutants import replaced
from tests.common.overlapped_model import overlapped_model, run_microbatches

reserved = torch._C._get_sm_carveout_experimental


def reserved_by_stage(has_device):
    """What is reserved while a stage runs, by the kind of its run and its name."""
    seen, model = defaultdict(set), overlapped_model(moe_flex_dispatcher_num_sms=8)
    with ExitStack() as stack:
        for kind in ("forward", "backward", "weight_grads"):
            plain = getattr(StageNode, kind)

            def noted(self, *args, _kind=kind, _plain=plain, **options):
                seen[_kind, self.name.split()[-1]].add(reserved())
                return _plain(self, *args, **options)

            stack.enter_context(replaced(StageNode, kind, noted))
        if has_device:
            stack.enter_context(replaced(streams, "native_stream", lambda role: object()))
        run_microbatches(model, delays_wgrad=True)
    streams.reset()
    return seen


@pytest.mark.parametrize(("has_device", "expected"), [(True, {8}), (False, {None})])
def test_experts_and_nothing_else_leave_room_on_a_device(has_device, expected):
    seen = reserved_by_stage(has_device)
    experts = {key for key in seen if key[1] == "experts"}
    assert experts == {("forward", "experts"), ("backward", "experts"), ("weight_grads", "experts")}
    assert all(seen[key] == expected for key in experts)
    assert all(values == {None} for key, values in seen.items() if key not in experts)
    assert reserved() is None
