"""Reading `.bin`/`.idx`: the layout byte by byte, and every fault named."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexReader, dtype_code, optimal_dtype
from megatron.core.errors import DataError
from tests.common.token_files import VECTOR_LENGTHS, vector_documents, write_tokens


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "data", vector_documents())


def change_bytes(path, offset, replacement):
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(replacement)


def test_index_has_the_documented_bytes(prefix):
    raw = Path(prefix + ".idx").read_bytes()
    assert len(raw) == 162
    assert raw[:34].hex() == "4d4d49444944580000" + "0100000000000000" + "08" + "0600000000000000" + "0700000000000000"
    assert raw[34:58].hex() == "050000000300000009000000010000000700000004000000"
    assert np.frombuffer(raw[58:106], "<i8").tolist() == [0, 10, 16, 34, 36, 50]
    assert np.frombuffer(raw[106:162], "<i8").tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_tokens_are_little_endian_without_a_header(tmp_path):
    prefix = write_tokens(tmp_path / "data", [[1, 258]])
    assert Path(prefix + ".bin").read_bytes() == b"\x01\x00\x02\x01"


@pytest.mark.parametrize("mmap", [True, False])
def test_sequences_read_back_whole_and_in_part(prefix, mmap):
    dataset = IndexedDataset(prefix, mmap=mmap)
    assert [sequence.tolist() for sequence in (dataset[i] for i in range(6))] == vector_documents()
    assert dataset.get(2, offset=3, length=4).tolist() == [11, 12, 13, 14]
    assert dataset.get(4, offset=5).tolist() == [23, 99]
    assert dataset.sequence_lengths.tolist() == list(VECTOR_LENGTHS)


@pytest.mark.parametrize("mmap", [True, False])
def test_pickled_dataset_opens_its_files_again(prefix, mmap):
    copy = pickle.loads(pickle.dumps(IndexedDataset(prefix, mmap=mmap)))
    assert copy.mmap is mmap
    assert copy[1].tolist() == [5, 6, 99]


def test_sequence_past_the_end_is_an_index_error(prefix):
    with pytest.raises(IndexError, match=r"sequence 6 of .*data, which has 6"):
        IndexedDataset(prefix)[6]


def test_multimodal_modes_behind_the_index_are_passed_over(prefix):
    with open(prefix + ".idx", "ab") as stream:
        stream.write(bytes(6))
    assert IndexedDataset(prefix)[1].tolist() == [5, 6, 99]


def test_missing_index_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.idx': there is no such index; run tools/preprocess_data"):
        IndexedDataset(str(tmp_path / "nothing"))


def test_missing_token_file_is_named(prefix):
    os.remove(prefix + ".bin")
    with pytest.raises(DataError, match=r"data\.bin is missing beside its index"):
        IndexedDataset(prefix)


def test_truncated_token_file_is_refused_with_both_sizes(prefix):
    os.truncate(prefix + ".bin", 57)
    with pytest.raises(DataError, match=r"57 bytes, its index asks for 58; the file is truncated"):
        IndexedDataset(prefix)


def test_foreign_token_file_is_refused(prefix):
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"xx")
    with pytest.raises(DataError, match=r"60 bytes, its index asks for 58; the file is truncated or belongs"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 20, 33])
def test_index_without_a_whole_header_is_no_index(prefix, size):
    os.truncate(prefix + ".idx", size)
    with pytest.raises(DataError, match="this is no token index"):
        IndexReader(prefix + ".idx")


@pytest.mark.parametrize("size", [34, 100, 161])
def test_truncated_index_is_refused_with_both_sizes(prefix, size):
    os.truncate(prefix + ".idx", size)
    with pytest.raises(DataError, match=rf"{size} bytes, but 6 sequences and 7 document borders need 162"):
        IndexReader(prefix + ".idx")


def test_index_with_surplus_bytes_is_refused(prefix):
    with open(prefix + ".idx", "ab") as stream:
        stream.write(bytes(3))
    with pytest.raises(DataError, match="165 bytes, but 6 sequences and 7 document borders need 162"):
        IndexReader(prefix + ".idx")


def test_foreign_index_is_refused_by_its_magic(prefix):
    change_bytes(prefix + ".idx", 0, b"NOTANIDX")
    with pytest.raises(DataError, match="this is no token index, it begins with b'NOTANIDX"):
        IndexReader(prefix + ".idx")


@pytest.mark.parametrize(("offset", "what"), [(9, "index version 7"), (17, "dtype code 9")])
def test_unknown_version_or_dtype_is_refused(prefix, offset, what):
    change_bytes(prefix + ".idx", offset, b"\x07" if offset == 9 else b"\x09")
    with pytest.raises(DataError, match=what):
        IndexReader(prefix + ".idx")


@pytest.mark.parametrize("offset", [106, 154])
def test_document_borders_that_do_not_span_the_file_are_refused(prefix, offset):
    change_bytes(prefix + ".idx", offset, b"\x05")
    with pytest.raises(DataError, match="document borders must run from 0 to 6"):
        IndexReader(prefix + ".idx")


def test_dtype_codes_are_the_documented_ones():
    names = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
    assert [dtype_code(name) for name in names] == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(DataError, match="dtype=complex64"):
        dtype_code("complex64")


def test_tokens_are_uint16_below_65500_ids():
    assert [optimal_dtype(size) for size in (257, 65499, 65500, None)] == [np.uint16, np.uint16, np.int32, np.int32]
