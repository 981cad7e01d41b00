"""The snapshot of the training state."""

import random

import numpy
import pytest
import torch

from megatron.core.tensor_parallel import random as rng
from tests.common.snapshot import diff, snapshot


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(4, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("low", torch.zeros(3).to(torch.float8_e4m3fn))


@pytest.fixture
def trained():
    rng.model_parallel_cuda_manual_seed(5, device="cpu")
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    yield model, optimizer
    rng.reset()


def take(trained):
    model, optimizer = trained
    return snapshot(model=model, optimizer=optimizer)


def test_untouched_state_has_no_difference(trained):
    assert diff(take(trained), take(trained)) == {}


TENSORS = ["linear.weight", "linear.weight.grad", "count", "scratch", "mask", "low"]


@pytest.mark.parametrize("name", TENSORS)
def test_one_flipped_bit_gives_exactly_one_entry(trained, name):
    model, _ = trained
    before = take(trained)
    owner = model.get_parameter("linear.weight") if name.startswith("linear") else model.get_buffer(name)
    tensor = owner.grad if name.endswith("grad") else owner
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw[0] ^= 1
    assert diff(before, take(trained)) == {f"model.{name}": "changed"}


def test_negative_zero_differs_from_zero(trained):
    model, _ = trained
    before = take(trained)
    model.scratch[0] = -0.0
    assert diff(before, take(trained)) == {"model.scratch": "changed"}


def test_equal_bytes_at_another_address_are_rebound(trained):
    model, _ = trained
    before = take(trained)
    model.count = model.count.clone()
    assert diff(before, take(trained)) == {"model.count": "rebound"}


def test_optimizer_moment_and_number_are_seen(trained):
    _, optimizer = trained
    before = take(trained)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.state_dict()["state"][0]["exp_avg"].add_(1)
    assert diff(before, take(trained)) == {
        "optimizer.param_groups.0.lr": "changed",
        "optimizer.state.0.exp_avg": "changed",
    }


def test_added_and_removed_values_are_named(trained):
    model, _ = trained
    before = take(trained)
    model.linear.weight.grad = None
    model.register_buffer("late", torch.ones(1))
    assert diff(before, take(trained)) == {"model.linear.weight.grad": "removed", "model.late": "added"}


DRAWS = {
    "rng.python": random.random,
    "rng.numpy": numpy.random.random_sample,
    "rng.torch": lambda: torch.rand(1),
    "rng.base_seed": lambda: rng.set_base_seed(9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_one_draw_changes_one_random_state(trained, name):
    before = take(trained)
    DRAWS[name]()
    assert diff(before, take(trained)) == {name: "changed"}


def test_fork_changes_the_state_of_its_name_only(trained):
    before = take(trained)
    with rng.get_cuda_rng_tracker().fork():
        torch.rand(1)
    assert diff(before, take(trained)) == {"rng.tracker.model-parallel-rng": "changed"}


def test_unregistered_tensor_attribute_is_an_error(trained):
    model, _ = trained
    model.linear.history = [torch.ones(1)]
    with pytest.raises(AssertionError, match=r"linear\.history\.0 is a tensor that is neither"):
        take(trained)
    named = snapshot(model=model, plain_tensors=["history"])
    assert "model.linear.history.0" in named
