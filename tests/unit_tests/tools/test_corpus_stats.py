"""Entropies of a text."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tools.corpus_stats import corpus_stats, main

CORPUS = Path(__file__).parents[3] / "examples" / "data" / "kjv_genesis_ruth.txt"


def test_alternating_bytes_have_one_bit_alone_and_none_in_context():
    stats = corpus_stats(b"ab" * 500)
    assert stats["entropy"] == pytest.approx(math.log(2))
    assert stats["bigram"] == pytest.approx(0.0, abs=1e-12)


def test_independent_bytes_keep_their_entropy_in_context():
    stats = corpus_stats(np.random.default_rng(0).integers(0, 16, 100_000, dtype=np.uint8).tobytes())
    assert stats["entropy"] == pytest.approx(math.log(16), abs=1e-3)
    assert stats["bigram"] == pytest.approx(math.log(16), abs=2e-3)


def test_shipped_corpus_has_the_figures_of_its_readme():
    stats = corpus_stats(CORPUS.read_bytes())
    assert (stats["bytes"], stats["documents"]) == (1049294, 236)
    assert stats["entropy"] == pytest.approx(3.056, abs=5e-4)
    assert stats["bigram"] == pytest.approx(2.231, abs=5e-4)


def test_figures_are_printed_as_words_and_as_json(capsys):
    assert main([str(CORPUS)]) == 0
    assert "1049294 bytes, 236 documents, entropy 3.056 nats per byte, bigram 2.231" in capsys.readouterr().out
    assert main([str(CORPUS), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 236


def test_missing_file_is_named(capsys):
    assert main(["gone"]) == 1
    assert "DataError: path='gone': no such file" in capsys.readouterr().err
