"""The stand-in for a capture: each thing that a capture cannot record is named with file and line."""

import inspect
import re

import pytest
import torch

from megatron.core.full_iteration_graph import FullIterationGraph
from megatron.core.full_iteration_graph.checks import CaptureViolation, CheckedRecording

CPU = torch.device("cpu")
WEIGHT = torch.eye(3)
ZERO, COUNTS, PLACES = torch.tensor(0.0), torch.tensor([1, 0, 2]), torch.tensor([2, 0])


def graph_of(step, batch=None):
    def body(batches):
        return step(batches[0]["x"])

    given = {"x": torch.tensor([1.0, 2.0, 3.0])} if batch is None else batch
    graph = FullIterationGraph("step", body, [given], recording=CheckedRecording(), device=CPU)
    graph.capture()
    return graph


def run(graph, *numbers):
    return graph.run([{"x": torch.tensor(numbers)}])


def double(x):
    return (x @ WEIGHT) * 2


def test_replays_compute_with_new_numbers_into_one_place():
    graph = graph_of(double)
    first = run(graph, 1.0, 2.0, 3.0)
    assert first.tolist() == [2.0, 4.0, 6.0]
    second = run(graph, 5.0, 6.0, 7.0)
    assert second.tolist() == [10.0, 12.0, 14.0]
    assert second.data_ptr() == first.data_ptr()
    assert graph.num_replays == 2


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.tolist()[0]


def backward_read(x):
    leaf = x.clone().requires_grad_()
    _ReadsInBackward.apply(leaf).sum().backward()
    return leaf.grad


FAULTS = {
    "tolist": lambda x: x * x.tolist()[0],
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "numpy": lambda x: x * float(x.numpy().sum()),
    "cpu": lambda x: x.cpu() * 2,
    "print": lambda x: x * len(f"{x}"),
    "repr": lambda x: x * len(repr(x)),
    "mask": lambda x: x[x > 0].sum(),
    "mask_write": lambda x: x.clone().masked_fill_(x > 9, 0).index_put_((x > 0,), ZERO),
    "nonzero": lambda x: x.nonzero().sum(),
    "masked_select": lambda x: x.masked_select(x > 0).sum(),
    "unique": lambda x: x.unique().sum(),
    "repeat_interleave": lambda x: x.repeat_interleave(COUNTS).sum(),
    "tensor": lambda x: x * torch.tensor([1.0, 2.0, 3.0]),
    "backward": backward_read,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_with_its_place(fault):
    step = FAULTS[fault]
    with pytest.raises(CaptureViolation) as violation:
        run(graph_of(step), 1.0, 2.0, 3.0)
    line = inspect.getsourcelines(_ReadsInBackward.backward if fault == "backward" else step)[1]
    place = re.match(r"(.*):(\d+): ", str(violation.value))
    assert place[1] == __file__
    assert line <= int(place[2]) <= line + 4


ALLOWED = {
    "nonzero_static": lambda x: torch.nonzero_static(x, size=3).sum(),
    "where": lambda x: torch.where(x > 0, x, -x),
    "spread": lambda x: x.repeat_interleave(COUNTS, output_size=3),
    "masked_fill": lambda x: x.masked_fill(x > 2, 0.0),
    "index": lambda x: x[PLACES],
    "shape": lambda x: x * x.shape[0],
}


@pytest.mark.parametrize("form", ALLOWED)
def test_forms_of_fixed_size_pass(form):
    graph = graph_of(ALLOWED[form])
    run(graph, 1.0, 2.0, 3.0)
    run(graph, 3.0, 1.0, 2.0)


def test_another_order_of_launches_is_found():
    calls = []

    def step(x):
        calls.append(1)
        return x.exp().sin() if len(calls) == 1 else x.sin().exp()

    graph = graph_of(step)
    run(graph, 1.0, 2.0, 3.0)
    with pytest.raises(CaptureViolation, match=r"operation 0 is aten.sin.default .* recorded was aten.exp.default"):
        run(graph, 1.0, 2.0, 3.0)


def test_another_shape_is_found():
    calls = []

    def step(x):
        calls.append(1)
        return torch.zeros(len(calls)).sum() + x

    graph = graph_of(step)
    run(graph, 1.0, 2.0, 3.0)
    with pytest.raises(CaptureViolation, match=r"operation 1 is aten.sum.default of float32 \[2\], recorded .* \[1\]"):
        run(graph, 1.0, 2.0, 3.0)


def test_one_launch_less_is_found():
    calls = []

    def step(x):
        calls.append(1)
        return x.exp().sin() if len(calls) == 1 else x.exp()

    graph = graph_of(step)
    run(graph, 1.0, 2.0, 3.0)
    with pytest.raises(CaptureViolation, match=r"1 operations, recorded were 2; first of the rest: aten.sin"):
        run(graph, 1.0, 2.0, 3.0)


def test_input_that_is_made_anew_is_found():
    kept = []
    holder = {"rate": torch.tensor(1.0)}
    graph = graph_of(lambda x: x * holder["rate"])
    run(graph, 1.0, 2.0, 3.0)
    kept.append(holder["rate"])
    holder["rate"] = torch.tensor(2.0)
    with pytest.raises(CaptureViolation, match=r"aten.mul.Tensor .*from outside of the step lies elsewhere"):
        run(graph, 1.0, 2.0, 3.0)


def test_input_that_is_written_in_place_passes():
    rate = torch.tensor(1.0)
    graph = graph_of(lambda x: x * rate)
    run(graph, 1.0, 2.0, 3.0)
    rate.fill_(2.0)
    assert run(graph, 1.0, 2.0, 3.0).tolist() == [2.0, 4.0, 6.0]
