"""The order of samples: fixed vectors, and where the last epoch is shuffled on its own."""

import numpy as np
import pytest

from megatron.core.datasets.gpt_index import build_sample_order, plan_samples
from tests.common.token_files import VECTOR_LENGTHS

SIZES = np.array(VECTOR_LENGTHS, dtype=np.int32)

# s, n, seed, epochs, separate, document index, sample index, shuffle index
VECTORS = {
    "one epoch": (8, None, 1234, 1, False, "2,1,5,0,4,3", "(0,0)(0,8)(3,0)(4,3)", "0,2,1"),
    "ten samples": (
        *(8, 10, 1234, 3, False, "5,3,5,4,1,2,0,2,4,1,1,3,2,4,0,5,0,3"),
        "(0,0)(2,3)(4,0)(5,5)(6,4)(7,7)(8,6)(12,0)(12,8)(14,0)(15,3)",
        "7,1,9,5,8,4,3,0,2,6",
    ),
    "separate last epoch": (
        *(8, 4, 1234, 2, True, "2,1,5,0,4,3,0,4,3,2,5,1"),
        "(0,0)(0,8)(3,0)(4,3)(6,3)(7,6)(9,6)(11,1)",
        "1,0,2,4,6,5,3",
    ),
    "five samples": (
        *(8, 5, 1234, 2, False, "1,2,5,2,3,4,1,0,4,5,0,3"),
        "(0,0)(1,5)(3,0)(3,8)(5,6)(7,4)(9,0)(10,4)",
        "1,0,3,2,5,4,6",
    ),
    "short samples": (
        *(4, 13, 7, 2, False, "1,4,2,5,0,1,5,2,3,0,3,4"),
        "(0,0)(1,1)(1,5)(2,2)(2,6)(3,1)(4,1)(5,0)(6,1)(7,1)(7,5)(8,0)(9,3)(11,1)(11,5)",
        "1,5,2,13,3,12,9,11,0,4,6,7,8,10",
    ),
}


def pairs(text):
    return [[int(number) for number in pair.split(",")] for pair in text.strip("()").split(")(")]


def numbers(text):
    return [int(number) for number in text.split(",")]


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_order_equals_the_published_vector(vector):
    s, n, seed, epochs, separate, documents, samples, shuffle = vector
    plan = plan_samples(int(SIZES.sum()), s, n)
    assert (plan.num_epochs, plan.is_last_epoch_separate) == (epochs, separate)
    order = build_sample_order(SIZES, np.arange(6, dtype=np.int32), plan, s, seed)
    assert order.document_index.tolist() == numbers(documents)
    assert order.sample_index.tolist() == pairs(samples)
    assert order.shuffle_index.tolist() == numbers(shuffle)
    assert (order.document_index.dtype, order.sample_index.dtype) == (np.int32, np.int32)
    assert order.shuffle_index.dtype == np.uint32


@pytest.mark.parametrize(
    ("num_requested", "num_epochs", "is_separate"),
    [(0, 1, False), (1, 1, False), (100, 1, False), (179, 2, True), (180, 2, False), (181, 2, False), (200, 2, False)],
)
def test_last_epoch_is_separate_below_eighty_percent(num_requested, num_epochs, is_separate):
    # 801 tokens of 8: exactly 100 samples in an epoch
    plan = plan_samples(801, 8, num_requested)
    assert (plan.num_epochs, plan.is_last_epoch_separate) == (num_epochs, is_separate)
    assert plan.num_samples >= num_requested


def test_separate_last_epoch_comes_after_all_whole_ones():
    lengths = np.full(100, 8, dtype=np.int32)
    plan = plan_samples(800, 8, 150)
    order = build_sample_order(lengths, np.arange(100, dtype=np.int32), plan, 8, seed=3)
    assert sorted(order.document_index[:100].tolist()) == list(range(100))
    assert sorted(order.document_index[100:].tolist()) == list(range(100))
    assert sorted(order.shuffle_index[:99].tolist()) == list(range(99))
    assert sorted(order.shuffle_index[99:].tolist()) == list(range(99, 199))


def test_joint_last_epoch_is_shuffled_with_the_rest():
    lengths = np.full(100, 8, dtype=np.int32)
    plan = plan_samples(800, 8, 190)
    order = build_sample_order(lengths, np.arange(100, dtype=np.int32), plan, 8, seed=3)
    assert sorted(order.document_index[:100].tolist()) != list(range(100))
    assert sorted(order.shuffle_index.tolist()) == list(range(199))


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 8, 29])
def test_no_request_breaks_the_plan(sequence_length):
    for num_requested in range(120):
        for num_tokens in range(2, 30):
            plan = plan_samples(num_tokens, sequence_length, num_requested)
            assert plan.num_epochs == 1 or (plan.num_epochs - 1) * num_tokens < num_requested * sequence_length + 1
            assert plan.num_samples >= num_requested


def test_kept_tail_ends_with_the_last_token():
    plan = plan_samples(29, 8, None, drop_last=False)
    order = build_sample_order(SIZES, np.arange(6, dtype=np.int32), plan, 8, seed=1234)
    assert plan.num_samples == 4
    assert order.sample_index.tolist() == [[0, 0], [0, 8], [3, 0], [4, 3], [5, 0]]


def test_kept_tail_without_extra_token_ends_past_the_last_token():
    plan = plan_samples(29, 8, None, num_extra_tokens=0, drop_last=False)
    order = build_sample_order(SIZES, np.arange(6, dtype=np.int32), plan, 8, seed=1234, num_extra_tokens=0)
    assert order.sample_index.tolist() == [[0, 0], [0, 8], [2, 4], [4, 3], [5, 1]]


def test_caller_indices_are_left_alone():
    indices = np.arange(6, dtype=np.int32)
    build_sample_order(SIZES, indices, plan_samples(29, 8, None), 8, seed=1)
    assert indices.tolist() == [0, 1, 2, 3, 4, 5]
