"""C++, NumPy and a closed form give the same indices, bit for bit."""

import logging
import re

import numpy as np
import pytest

from megatron.core import optional_deps
from megatron.core.datasets import index_kernels

NUM_CASES = 300


def helpers():
    if not optional_deps.is_available("helpers_cpp"):
        pytest.skip("helpers_cpp cannot be imported: the extension was not built")
    return optional_deps.require("helpers_cpp")


def places_by_counting(sizes, document_index, sequence_length, num_samples, num_extra_tokens):
    """Walk over single tokens; with no extra token a document also has a place behind its last token."""
    places, flat = {}, 0
    for row, document in enumerate(document_index):
        for offset in range(sizes[document] + (0 if num_extra_tokens else 1)):
            places.setdefault(flat + offset, (row, offset))
        flat += int(sizes[document])
    return [list(places[i * sequence_length]) for i in range(num_samples + 1)]


def random_case(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0 if seed % 3 == 0 else 1, 40, size=rng.integers(1, 30)).astype(np.int32)
    sizes[rng.integers(len(sizes))] = 50
    document_index = rng.integers(0, len(sizes), size=rng.integers(1, 60)).astype(np.int32)
    document_index[rng.integers(len(document_index))] = int(np.argmax(sizes))
    num_extra_tokens = int(rng.integers(0, 2))
    sequence_length = int(rng.integers(1, 50))
    num_samples = (int(sizes[document_index].sum()) - num_extra_tokens) // sequence_length
    return sizes, document_index, sequence_length, num_samples, num_extra_tokens


@pytest.mark.parametrize("first_seed", range(0, NUM_CASES, 100))
def test_numpy_sample_index_equals_counting(first_seed):
    for seed in range(first_seed, first_seed + 100):
        case = random_case(seed)
        assert index_kernels.sample_index_numpy(*case).tolist() == places_by_counting(*case), f"seed {seed}"


@pytest.mark.parametrize("first_seed", range(0, NUM_CASES, 100))
def test_compiled_sample_index_equals_numpy(first_seed):
    compiled = helpers()
    for seed in range(first_seed, first_seed + 100):
        case = random_case(seed)
        expected = index_kernels.sample_index_numpy(*case)
        for build, dtype in ((compiled.build_sample_idx_int32, np.int32), (compiled.build_sample_idx_int64, np.int64)):
            got = build(*case)
            assert got.dtype == dtype
            assert got.tolist() == expected.tolist(), f"seed {seed}"


def test_compiled_builder_refuses_more_samples_than_tokens():
    with pytest.raises(ValueError, match="fewer tokens than the samples need"):
        helpers().build_sample_idx_int32(np.array([5], np.int32), np.array([0], np.int32), 4, 2, 1)


BLENDS = {
    (0.5, 0.3, 0.2): ("0,1,2,0,1,0,2,0,1,0,0,1", "0,0,0,1,1,2,1,3,2,4,5,3"),
    (0.5, 0.5): ("0,1,0,1,0,1", "0,0,1,1,2,2"),
    (0.1, 0.9): ("1,0,1,1,1,1,1,1,1,1", "0,0,1,2,3,4,5,6,7,8"),
}


def builders():
    compiled = optional_deps.require("helpers_cpp") if optional_deps.is_available("helpers_cpp") else None
    return [index_kernels.blending_indices_numpy, *([compiled.build_blending_indices] if compiled else [])]


@pytest.mark.parametrize("weights", BLENDS)
def test_blend_equals_the_published_vector(weights):
    datasets, samples = ([int(word) for word in text.split(",")] for text in BLENDS[weights])
    for build in builders():
        dataset_index, dataset_sample_index = build(np.array(weights), len(datasets))
        assert (dataset_index.dtype, dataset_sample_index.dtype) == (np.int16, np.int64)
        assert dataset_index.tolist() == datasets
        assert dataset_sample_index.tolist() == samples


EXHAUSTIVE = {
    "published": ([3, 2, 4], [2, 0, 1, 2, 0, 2, 1, 0, 2], [0, 0, 0, 1, 1, 2, 1, 2, 3]),
    "one is empty": ([0, 2, 2], [1, 2, 1, 2], [0, 0, 1, 1]),
}


@pytest.mark.parametrize(("sizes", "datasets", "samples"), EXHAUSTIVE.values(), ids=EXHAUSTIVE)
def test_exhaustive_blend_equals_the_vector(sizes, datasets, samples):
    candidates = [index_kernels.exhaustive_blending_indices_numpy]
    if optional_deps.is_available("helpers_cpp"):
        candidates.append(optional_deps.require("helpers_cpp").build_exhaustive_blending_indices)
    for build in candidates:
        dataset_index, dataset_sample_index = build(np.array(sizes))
        assert dataset_index.tolist() == datasets
        assert dataset_sample_index.tolist() == samples


def test_compiled_blends_equal_numpy_on_random_weights():
    compiled = helpers()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        weights = rng.dirichlet(np.full(rng.integers(1, 12), 0.5))
        for got, expected in zip(
            compiled.build_blending_indices(weights, 200),
            index_kernels.blending_indices_numpy(weights, 200),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected, err_msg=f"seed {seed}")


def test_compiled_exhaustive_blends_equal_numpy_and_use_each_sample_once():
    compiled = helpers()
    for seed in range(30):
        sizes = np.random.default_rng(seed).integers(0, 40, size=5)
        got = compiled.build_exhaustive_blending_indices(sizes)
        expected = index_kernels.exhaustive_blending_indices_numpy(sizes)
        assert [part.tolist() for part in got] == [part.tolist() for part in expected], f"seed {seed}"
        assert np.bincount(got[0], minlength=5).tolist() == sizes.tolist()


@pytest.mark.parametrize(("is_built", "which"), [(True, "the C\\+\\+ extension"), (False, "NumPy .*the same bits")])
def test_one_line_says_which_builder_is_used(monkeypatch, caplog, is_built, which):
    monkeypatch.setattr(index_kernels, "is_available", lambda name: is_built)
    monkeypatch.setattr(index_kernels, "require", {"helpers_cpp": None}.get if is_built else None)
    index_kernels._compiled.cache_clear()
    with caplog.at_level(logging.INFO, logger="megatron"):
        index_kernels._compiled()
        index_kernels._compiled()
    index_kernels._compiled.cache_clear()
    lines = [record.getMessage() for record in caplog.records if "indices are built" in record.getMessage()]
    assert len(lines) == 1
    assert re.search(which, lines[0])


def test_both_builders_serve_the_public_function(monkeypatch):
    sizes, documents = np.array([5, 3], np.int32), np.array([1, 0], np.int32)
    for compiled in (None, helpers()):
        monkeypatch.setattr(index_kernels, "_compiled", lambda compiled=compiled: compiled)
        index = index_kernels.build_sample_index(sizes, documents, 2, 3, 1)
        assert index.dtype == np.int32
        assert index.tolist() == [[0, 0], [0, 2], [1, 1], [1, 3]]
