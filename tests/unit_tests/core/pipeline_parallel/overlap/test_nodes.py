"""A stage of one microbatch: graph, streams, memory, weight gradients."""

import weakref

import pytest
import torch

from megatron.core import streams
from megatron.core.deferred_wgrad import WgradQueue, active_queue
from megatron.core.pipeline_parallel.overlap.nodes import Handed, StageNode, hand_over
from megatron.core.streams import Role
from tests.common.mutants import replaced
from tests.common.small_models import normal

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_streams():
    yield
    streams.reset()


def made_on(role, tensor):
    with streams.on(role):
        return hand_over(tensor)


def alive(tensor):
    """A question that can be asked after `tensor` is forgotten: does its memory still exist?"""
    reference = weakref.ref(tensor.untyped_storage())
    return lambda: reference() is not None


class Product(torch.autograd.Function):
    """rows [r, k] @ weight [k, n]; the weight gradient goes to the active queue if there is one."""

    @staticmethod
    def forward(ctx, rows, weight, seen):
        ctx.save_for_backward(rows, weight)
        ctx.queue, ctx.seen = active_queue(), seen
        return rows @ weight

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors

        def compute():
            ctx.seen.append(streams.current_role())
            weight.grad = (rows.t() @ grad).detach()

        if ctx.queue is None:
            compute()
        else:
            ctx.queue.put([], compute)
        return grad @ weight.t(), None, None


def weight_of(value=None):
    return torch.nn.Parameter(normal(4, 3, seed=2) if value is None else value)


def test_gradients_equal_those_of_an_uncut_graph():
    weight, rows = weight_of(), normal(5, 4)
    with streams.step(CPU):
        first = StageNode("a", Role.COMPUTE, lambda x: (x @ weight,))
        second = StageNode("b", Role.COMM, lambda x: (x.sin(), x * 2))
        out = second.forward(*first.forward(hand_over(rows)))
        grads = [made_on(Role.COMM, torch.ones_like(value.tensor)) for value in out]
        (grad,) = first.backward(*second.backward(*grads))
    leaf = rows.clone().requires_grad_()
    y = leaf @ weight
    expected = torch.autograd.grad([y.sin(), y * 2], [leaf, weight], [torch.ones_like(y)] * 2)
    assert torch.equal(grad.tensor, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_input_that_nobody_saved_goes_after_forward():
    with streams.step(CPU):
        rows = hand_over(normal(5, 4))
        is_alive = alive(rows.tensor)
        StageNode("a", Role.COMPUTE, lambda x: (x + 1,)).forward(rows)
        del rows
        assert not is_alive()


def test_input_that_autograd_saved_stays():
    node = StageNode("a", Role.COMPUTE, lambda x: (x.sin(),))
    with streams.step(CPU):
        rows = hand_over(normal(5, 4))
        is_alive = alive(rows.tensor)
        (out,) = node.forward(rows)
        del rows
        assert is_alive()
        node.backward(hand_over(torch.ones_like(out.tensor)))
        assert not is_alive()


def test_input_of_the_other_stream_goes_once_its_owner_has_waited():
    with streams.step(CPU):
        rows = made_on(Role.COMM, normal(5, 4))
        is_alive = alive(rows.tensor)
        (out,) = StageNode("a", Role.COMPUTE, lambda x: (x + 1,)).forward(rows)
        del rows
        assert is_alive()
        StageNode("b", Role.COMM, lambda x: (x + 1,)).forward(out)
        assert not is_alive()


def test_node_waits_for_the_other_stream_only():
    waits = []
    with streams.step(CPU), replaced(streams, "wait", lambda event: waits.append(event.role)):
        a, b = made_on(Role.COMPUTE, torch.ones(1)), made_on(Role.COMM, torch.ones(1))
        StageNode("a", Role.COMM, lambda x, y: (x + y,)).forward(a, b)
    assert waits == [Role.COMPUTE]


def test_view_of_an_input_stays_its_owners_memory():
    with streams.step(CPU):
        rows = made_on(Role.COMPUTE, normal(4, 4))
        same, copy = StageNode("a", Role.COMM, lambda x: (x.view(-1), x.clone())).forward(rows)
    assert (same.owner, copy.owner) == (Role.COMPUTE, Role.COMM)


def test_missing_inputs_and_gradients_are_passed_over():
    node = StageNode("a", Role.COMPUTE, lambda x, none: (x * 2, none, x.detach()))
    with streams.step(CPU):
        outputs = node.forward(hand_over(torch.ones(2)), None)
        assert [value is None for value in outputs] == [False, True, False]
        grads = node.backward(hand_over(torch.ones(2)), None, None)
    assert grads[1] is None
    assert grads[0].tensor.tolist() == [2.0, 2.0]


def _delayed_wgrad(queue):
    """Forward and backward of a product on comm, weight gradient called from compute; returns (weight, roles seen)."""
    weight, seen = weight_of(), []
    node = StageNode("a", Role.COMM, lambda x: (Product.apply(x, weight, seen),), queue=queue)
    with streams.step(CPU):
        (out,) = node.forward(made_on(Role.COMPUTE, normal(5, 4)))
        node.backward(made_on(Role.COMPUTE, torch.ones_like(out.tensor)))
        assert (weight.grad is None) == (queue is not None)
        node.weight_grads()
    return weight, seen


def test_delayed_weight_gradient_equals_the_immediate_one():
    now, _ = _delayed_wgrad(None)
    later, _ = _delayed_wgrad(WgradQueue())
    assert torch.equal(now.grad, later.grad)


def test_delayed_weight_gradient_runs_on_the_stream_of_its_stage():
    assert _delayed_wgrad(WgradQueue())[1] == [Role.COMM]


def test_weight_gradient_on_the_ambient_stream_is_seen():
    def on_ambient_stream(self):
        self.queue.flush()
        return 1

    with replaced(StageNode, "weight_grads", on_ambient_stream):
        assert _delayed_wgrad(WgradQueue())[1] == [Role.COMPUTE]


def test_delayed_weight_gradient_records_no_event():
    """An event behind it would make the exchange backward wait for products that it does not need."""
    node = StageNode("a", Role.COMPUTE, lambda x: (Product.apply(x, weight_of(), []),), queue=WgradQueue())
    with streams.step(CPU):
        (out,) = node.forward(hand_over(normal(5, 4)))
        node.backward(hand_over(torch.ones_like(out.tensor)))
        before = streams.record().clock[Role.COMPUTE]
        node.weight_grads()
        assert streams.record().clock[Role.COMPUTE] == before + 1


def test_foreign_operands_outlive_the_delayed_weight_gradient():
    weight = weight_of()
    node = StageNode("a", Role.COMPUTE, lambda x: (Product.apply(x, weight, []),), keeps={0}, queue=WgradQueue())
    with streams.step(CPU):
        rows, grad = normal(5, 4), torch.ones(5, 3, dtype=torch.float64)
        questions = alive(rows), alive(grad)
        rows, grad = made_on(Role.COMM, rows), made_on(Role.COMM, grad)
        node.forward(rows)
        node.backward(grad)
        del rows, grad
        _comm_waits_for_compute()
        assert all(is_alive() for is_alive in questions)
        node.weight_grads()
        assert all(is_alive() for is_alive in questions)
        _comm_waits_for_compute()
        assert not any(is_alive() for is_alive in questions)


def _comm_waits_for_compute():
    event = streams.record()
    with streams.on(Role.COMM):
        streams.wait(event)


def test_without_backward_nothing_is_remembered():
    weight = weight_of()
    with streams.step(CPU):
        rows = hand_over(normal(5, 4))
        is_alive = alive(rows.tensor)
        (out,) = StageNode("a", Role.COMPUTE, lambda x: (x @ weight,)).forward(rows, is_kept=False)
        del rows
        assert not is_alive()
    assert isinstance(out, Handed)
    assert not out.tensor.requires_grad
