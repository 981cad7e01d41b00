"""Joining token files."""

import os

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tests.common.token_files import write_tokens
from tools.merge_datasets import main


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "parts").mkdir()
    write_tokens(tmp_path / "parts" / "b", [[3], []])
    write_tokens(tmp_path / "parts" / "a", [[1, 2]])
    for place, name in enumerate("gfedc"):
        write_tokens(tmp_path / "parts" / name, [[place]])
    return tmp_path / "parts"


def test_folder_is_joined_in_the_order_of_names(folder, tmp_path, capsys):
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "all")]) == 0
    merged = IndexedDataset(str(tmp_path / "all"))
    assert [merged[place].tolist() for place in range(7)] == [[1, 2], [3], [4], [3], [2], [1], [0]]
    assert merged.document_indices.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert "8 documents" in capsys.readouterr().out


def test_prefixes_are_joined_in_the_order_given(folder, tmp_path):
    inputs = [str(folder / "b"), str(folder / "a"), str(folder / "b")]
    assert main(["--input", *inputs, "--output-prefix", str(tmp_path / "all")]) == 0
    merged = IndexedDataset(str(tmp_path / "all"))
    assert [merged[place].tolist() for place in range(3)] == [[3], [1, 2], [3]]
    assert merged.document_indices.tolist() == [0, 1, 1, 2, 3, 3]


def test_merged_files_equal_files_written_at_once(folder, tmp_path):
    main(["--input", str(folder / "a"), str(folder / "b"), "--output-prefix", str(tmp_path / "all")])
    write_tokens(tmp_path / "once", [[1, 2], [3], []])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"all{suffix}").read_bytes() == (tmp_path / f"once{suffix}").read_bytes()


def test_other_dtype_is_refused(folder, tmp_path, capsys):
    write_tokens(folder / "c", [[9]], dtype=np.int32)
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "all")]) == 1
    assert "its tokens are int32, the output has uint16" in capsys.readouterr().err
    assert not (tmp_path / "all.idx").exists()


def test_missing_partner_empty_folder_and_overwriting_are_refused(folder, tmp_path, capsys):
    os.remove(folder / "a.idx")
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "all")]) == 1
    (tmp_path / "empty").mkdir()
    assert main(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "all")]) == 1
    assert main(["--input", str(folder / "b"), "--output-prefix", str(folder / "b")]) == 1
    errors = capsys.readouterr().err
    assert "must both be there; copy the missing one" in errors
    assert "there are no .bin and .idx files in this folder" in errors
    assert "it is also an input and would be overwritten" in errors
