"""Writing `.bin`/`.idx`."""

import os
import warnings

import numpy as np
import pytest

from megatron.core.datasets import indexed_dataset_builder
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexReader
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder, sequence_pointers, write_index
from megatron.core.errors import DataError
from tests.common.token_files import write_tokens


def test_pointers_of_huge_sequences_do_not_wrap():
    lengths = np.array([2**30, 2**30, 2**30], dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sequence_pointers(lengths, 4).tolist() == [0, 4294967296, 8589934592]


def test_index_of_huge_sequences_reads_back(tmp_path):
    lengths = np.array([2**30, 2**30, 2**30], dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_index(str(tmp_path / "big.idx"), np.int32, lengths, np.array([0, 3]))
        index = IndexReader(str(tmp_path / "big.idx"))
        assert index.num_bin_bytes == 12884901888
    assert index.sequence_pointers.tolist() == [0, 4294967296, 8589934592]


def test_documents_of_several_sequences_keep_their_borders(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(np.array([1, 2, 3]), [2, 1])
    builder.add_item(np.array([4]))
    builder.add_item(np.array([5, 6]))
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    dataset = IndexedDataset(str(tmp_path / "a"))
    assert [dataset[i].tolist() for i in range(4)] == [[1, 2], [3], [4], [5, 6]]
    assert dataset.document_indices.tolist() == [0, 2, 4]


def test_empty_document_repeats_a_border_and_has_no_sequence(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[], [1], [], [2, 3]])
    dataset = IndexedDataset(prefix)
    assert dataset.document_indices.tolist() == [0, 0, 1, 1, 2]
    assert dataset.sequence_lengths.tolist() == [1, 2]


def test_merged_files_shift_borders_and_skip_the_first_zero(tmp_path):
    first = write_tokens(tmp_path / "a", [[1], [2, 3]])
    second = write_tokens(tmp_path / "b", [[4, 5], []])
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    builder.add_index(first)
    builder.add_index(second)
    builder.finalize(str(tmp_path / "c.idx"))
    merged = IndexedDataset(str(tmp_path / "c"))
    assert [merged[i].tolist() for i in range(3)] == [[1], [2, 3], [4, 5]]
    assert merged.document_indices.tolist() == [0, 1, 2, 3, 3]


def test_merging_another_dtype_is_refused_with_both_names(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[1]], dtype=np.int32)
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    with pytest.raises(DataError, match="its tokens are int32, the output has uint16"):
        builder.add_index(prefix)


def test_merging_a_truncated_file_is_refused(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[1, 2]])
    os.truncate(prefix + ".bin", 2)
    with pytest.raises(DataError, match="has 2 bytes, its index asks for 4"):
        IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16).add_index(prefix)


@pytest.mark.parametrize("token", [65536, -1])
def test_token_outside_of_the_dtype_is_refused(tmp_path, token):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    with pytest.raises(DataError, match=f"token id {token}: outside of uint16"):
        builder.add_item(np.array([5, token]))


def test_sequence_too_long_for_an_index_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset_builder, "MAX_SEQUENCE_TOKENS", 3)
    with pytest.raises(DataError, match="sequence length=4: an index holds at most 3"):
        IndexedDatasetBuilder(str(tmp_path / "a.bin")).add_item(np.arange(4))


def test_lengths_that_do_not_sum_to_the_tokens_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"lengths=\[1, 1\]: their sum is not the 3 tokens"):
        IndexedDatasetBuilder(str(tmp_path / "a.bin")).add_document(np.arange(3), [1, 1])


def test_unended_document_is_refused_at_the_end(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"))
    builder.add_item(np.arange(3))
    with pytest.raises(DataError, match="the last document was not ended"):
        builder.finalize(str(tmp_path / "a.idx"))


def test_index_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    def fail(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(indexed_dataset_builder.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "a", [[1]])
    assert not (tmp_path / "a.idx").exists()


def test_documents_given_at_once_equal_documents_given_singly(tmp_path):
    tokens, lengths = np.arange(5, dtype=np.uint16), np.array([2, 0, 3], dtype=np.int32)
    for name in ("once", "singly"):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        if name == "once":
            builder.add_documents(tokens, lengths)
        else:
            builder.add_document(tokens[:2], [2])
            builder.add_document(tokens[:0], [])
            builder.add_document(tokens[2:], [3])
        builder.finalize(str(tmp_path / f"{name}.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"once.{suffix}").read_bytes() == (tmp_path / f"singly.{suffix}").read_bytes()


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    with pytest.raises(DataError, match="lengths of 2 documents: their sum 4 is not the 3 tokens"):
        builder.add_documents(np.arange(3, dtype=np.uint16), np.array([2, 2], dtype=np.int32))
