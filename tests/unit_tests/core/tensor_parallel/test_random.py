"""The tracker of random states on the CPU."""

import pytest
import torch

from megatron.core.tensor_parallel import random as rng


@pytest.fixture(autouse=True)
def _forget_random_state():
    rng.reset()
    yield
    rng.reset()


def drawn_from(seed: int, count: int = 4) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_states_follow_the_table_of_seeds():
    rng.model_parallel_cuda_manual_seed(42, device="cpu")
    tracker = rng.get_cuda_rng_tracker()
    assert torch.equal(torch.rand(4), drawn_from(42))
    with tracker.fork():
        assert torch.equal(torch.rand(4), drawn_from(42 + 2718))
    with tracker.fork(rng.get_expert_parallel_rng_tracker_name()):
        assert torch.equal(torch.rand(4), drawn_from(42 + 1024))
    with tracker.fork(rng.get_data_parallel_rng_tracker_name()):
        assert torch.equal(torch.rand(4), drawn_from(42))


def test_fork_continues_its_own_stream_and_leaves_the_default_one():
    rng.model_parallel_cuda_manual_seed(7, device="cpu")
    tracker = rng.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(4)
    with tracker.fork():
        second = torch.rand(4)
    assert torch.equal(torch.cat([first, second]), drawn_from(7 + 2718, 8))
    assert torch.equal(torch.rand(4), drawn_from(7))


def test_fork_restores_the_default_stream_after_an_error():
    rng.model_parallel_cuda_manual_seed(7, device="cpu")
    with pytest.raises(ZeroDivisionError), rng.get_cuda_rng_tracker().fork():
        torch.rand(3 // 0)
    assert torch.equal(torch.rand(4), drawn_from(7))


def test_states_restored_later_give_the_same_numbers():
    rng.model_parallel_cuda_manual_seed(7, device="cpu")
    tracker = rng.get_cuda_rng_tracker()
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(4)
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(4), first)


def test_saved_states_do_not_change_with_the_tracker():
    rng.model_parallel_cuda_manual_seed(7, device="cpu")
    tracker = rng.get_cuda_rng_tracker()
    saved = tracker.get_states()
    before = {name: state.clone() for name, state in saved.items()}
    with tracker.fork():
        torch.rand(1000)
    assert all(torch.equal(saved[name], before[name]) for name in before)


def test_duplicate_name_and_seed_are_refused():
    tracker = rng.RngStatesTracker(torch.device("cpu"))
    tracker.add("a", 5)
    with pytest.raises(RuntimeError, match="'a': exists already"):
        tracker.add("a", 6)
    with pytest.raises(RuntimeError, match="seed 5 is taken"):
        tracker.add("b", 5)


def test_unknown_state_names_the_known_ones():
    rng.model_parallel_cuda_manual_seed(7, device="cpu")
    fork = rng.get_cuda_rng_tracker().fork("typo")
    with pytest.raises(RuntimeError, match=r"'typo': unknown, have \['data-parallel-rng'"):
        fork.__enter__()


def test_base_seed_is_1234_until_set_and_after_reset():
    assert rng.get_base_seed() == 1234
    rng.set_random_seed(99, device="cpu")
    assert rng.get_base_seed() == 99
    rng.reset()
    assert rng.get_base_seed() == 1234


def test_set_random_seed_seeds_python_numpy_and_torch():
    import random

    import numpy

    rng.set_random_seed(3, device="cpu")
    got = (random.random(), numpy.random.random_sample(), torch.rand(1))  # noqa: NPY002
    expected = (random.Random(3).random(), numpy.random.RandomState(3).random_sample(), drawn_from(3, 1))
    assert got == expected
    with pytest.raises(ValueError, match="seed=0: must be positive"):
        rng.set_random_seed(0, device="cpu")


def test_device_state_goes_back_with_all_named_states():
    rng.model_parallel_cuda_manual_seed(3, device="cpu")
    saved = rng.DeviceRngState(torch.device("cpu"))

    def draw():
        with rng.get_cuda_rng_tracker().fork():
            inner = torch.rand(2)
        return torch.cat([inner, torch.rand(2)])

    first = draw()
    assert not torch.equal(draw(), first)
    saved.restore()
    assert torch.equal(draw(), first)
