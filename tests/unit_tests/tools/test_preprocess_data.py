"""Text to token files."""

import json
import time

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tools import preprocess_data
from tools.preprocess_data import main, make_tasks, parse_arguments, preprocess


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [{"text": text, "title": f"t{place}"} for place, text in enumerate(["", "a", "", "b"])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(path, prefix, *options):
    arguments = ["--input", path, "--output-prefix", str(prefix), "--tokenizer-type", "ByteTokenizer"]
    workers = [] if "--workers" in options else ["--workers", "1"]
    prefixes = preprocess(parse_arguments([*arguments, *workers, *options]))
    return [IndexedDataset(name) for name in prefixes]


def sequences(dataset):
    return [dataset[place].tolist() for place in range(len(dataset))]


@pytest.mark.parametrize(("options", "expected"), [((), [[97], [98]]), (("--append-eod",), [[97, 256], [98, 256]])])
def test_empty_texts_leave_borders_and_no_sequence(jsonl, tmp_path, options, expected):
    (dataset,) = run(jsonl, tmp_path / "out", *options)
    assert sequences(dataset) == expected
    assert dataset.document_indices.tolist() == [0, 0, 1, 1, 2]
    assert dataset.sequence_lengths.sum() * 2 == (tmp_path / "out_text_document.bin").stat().st_size


@pytest.mark.parametrize("options", [(), ("--append-eod",)])
def test_two_workers_write_the_same_files_as_one(jsonl, tmp_path, monkeypatch, options):
    monkeypatch.setattr(preprocess_data, "TASK_CHARACTERS", 1)
    run(jsonl, tmp_path / "one", *options)
    run(jsonl, tmp_path / "two", *options, "--workers", "2")
    for suffix in (".bin", ".idx"):
        one, two = ((tmp_path / f"{name}_text_document{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_slow_worker_keeps_its_place(jsonl, tmp_path, monkeypatch):
    def encode(self, text):
        time.sleep(0.3 if text == "a" else 0.0)
        return np.frombuffer(text.encode(), dtype=np.uint8)

    monkeypatch.setattr(preprocess_data, "TASK_CHARACTERS", 1)
    monkeypatch.setattr("megatron.core.tokenizers.byte.ByteTokenizer._encode", encode)
    assert sequences(run(jsonl, tmp_path / "out", "--workers", "2")[0]) == [[97], [98]]


def test_each_key_gets_its_own_files(jsonl, tmp_path):
    text, title = run(jsonl, tmp_path / "out", "--json-keys", "text", "title")
    assert sequences(text) == [[97], [98]]
    assert sequences(title) == [[116, 48 + place] for place in range(4)]
    assert (tmp_path / "out_title_document.bin").exists()


def test_blank_lines_separate_documents_of_plain_text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n\nab\nc\n\n \n\nd")
    (dataset,) = run(str(path), tmp_path / "out")
    assert [bytes(sequence) for sequence in sequences(dataset)] == [b"ab\nc\n", b"d"]
    assert dataset.document_indices.tolist() == [0, 1, 2]


def test_format_can_be_forced(tmp_path):
    path = tmp_path / "in.dat"
    path.write_text("ab\n")
    assert sequences(run(str(path), tmp_path / "out", "--input-format", "text")[0]) == [[97, 98, 10]]


def test_tokens_use_the_smallest_common_dtype(jsonl, tmp_path):
    assert run(jsonl, tmp_path / "out")[0].index.dtype == np.uint16


def test_documents_can_be_limited(jsonl, tmp_path):
    (dataset,) = run(jsonl, tmp_path / "out", "--max-documents", "2")
    assert dataset.document_indices.tolist() == [0, 0, 1]


def test_tasks_number_their_documents(monkeypatch):
    monkeypatch.setattr(preprocess_data, "TASK_CHARACTERS", 5)
    tasks = list(make_tasks(["abc", "de", "fghijk", "", "l", "m"], max_documents=5))
    assert tasks == [(0, ["abc", "de"]), (2, ["fghijk"]), (3, ["", "l"])]


def test_tokenizer_without_an_end_of_document_is_named(jsonl, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megatron.core.tokenizers.byte.ByteTokenizer._special", lambda self, name: None)
    arguments = ["--input", jsonl, "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]
    assert main([*arguments, "--workers", "1", "--append-eod"]) == 1
    assert "DataError: tokenizer_type='ByteTokenizer': it has no eod token" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}\n', "input line 2: no text under text; correct the line or --json-keys"),
        ('{"text": "a"}\nplain\n', "input line 2: this is no JSON"),
        ('{"text": ""}\n', "1 documents without a single token; give a corpus with text"),
        ("", "0 documents without a single token"),
    ],
)
def test_broken_input_is_named(tmp_path, capsys, monkeypatch, workers, text, message):
    monkeypatch.setattr(preprocess_data, "TASK_CHARACTERS", 1)
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]
    assert main([*arguments, "--workers", workers]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o_text_document.idx").exists()


def test_missing_input_and_missing_workers_are_named(tmp_path, capsys):
    arguments = ["--input", "gone", "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "ByteTokenizer"]
    assert main([*arguments, "--workers", "1"]) == 1
    assert "input='gone': there is no such file" in capsys.readouterr().err
    assert main([*arguments, "--workers", "0"]) == 2
    assert "workers=0: at least one process tokenizes" in capsys.readouterr().err


def test_progress_is_told_in_lines_where_no_terminal_is(jsonl, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preprocess_data, "TASK_CHARACTERS", 1)
    run(jsonl, tmp_path / "out", "--log-interval", "2")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["2 documents", "4 documents"]


@pytest.mark.parametrize(
    ("source", "prefix", "message"),
    [
        (".", "out", "there is no such file, or it is not readable"),
        ("latin.txt", "out", "this is no UTF-8 text"),
        ("good.txt", "good.txt/out", "the folder cannot be made"),
    ],
)
def test_path_that_does_not_serve_is_named(tmp_path, capsys, source, prefix, message):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "good.txt").write_text("a\n")
    words = ["--input", str(tmp_path / source), "--output-prefix", str(tmp_path / prefix)]
    assert main([*words, "--tokenizer-type", "ByteTokenizer", "--workers", "1"]) == 1
    assert message in capsys.readouterr().err
