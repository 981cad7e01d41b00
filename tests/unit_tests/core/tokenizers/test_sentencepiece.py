"""Sentencepiece models trained on a few lines."""

import numpy as np
import pytest

from megatron.core.errors import DataError
from megatron.core.tokenizers.sentencepiece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)

library = pytest.importorskip("sentencepiece")
LINES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(folder / "tiny"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return str(folder / "tiny.model")


@pytest.mark.parametrize("kind", [GPTSentencePieceTokenizer, SentencePieceTokenizer])
def test_text_survives_the_round_trip(model, kind):
    tokenizer = kind(model)
    ids = tokenizer.tokenize(LINES[0])
    assert 0 < len(ids) < len(LINES[0])
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.detokenize(ids) == LINES[0]


@pytest.mark.parametrize("kind", [GPTSentencePieceTokenizer, SentencePieceTokenizer, Llama2Tokenizer])
def test_arrays_hold_the_same_ids(model, kind):
    tokenizer = kind(model)
    for text in (LINES[0], ""):
        array = tokenizer.tokenize_array(text, np.dtype(np.uint16))
        assert (array.dtype, array.tolist()) == (np.uint16, tokenizer.tokenize(text))


def test_gpt_form_ends_a_document_with_the_models_own_end(model):
    tokenizer = GPTSentencePieceTokenizer(model)
    assert tokenizer.special_ids() == {"eod": 2, "eos": 2, "bos": 1, "unk": 0}
    assert tokenizer.vocab_size == library.SentencePieceProcessor(model_file=model).GetPieceSize()


def test_llama_form_begins_each_text_with_bos(model):
    plain, llama = GPTSentencePieceTokenizer(model), Llama2Tokenizer(model)
    assert llama.tokenize("the fox") == [1, *plain.tokenize("the fox")]


def test_missing_special_ids_follow_the_vocabulary(model):
    size = GPTSentencePieceTokenizer(model).vocab_size
    tokenizer = SentencePieceTokenizer(model)
    ids = tokenizer.special_ids()
    assert [ids[name] for name in ("cls", "sep", "eod", "mask", "pad")] == [size + place for place in range(5)]
    assert (ids["bos"], ids["eos"], tokenizer.vocab_size) == (1, 2, size + 5)
    assert tokenizer.detokenize([*tokenizer.tokenize("the fox"), ids["eod"]]) == "the fox<EOD>"


def test_foreign_file_is_named(tmp_path):
    (tmp_path / "x.model").write_text("no model")
    for name, message in (
        ("x.model", "this is no sentencepiece model"),
        ("gone.model", r"it cannot be read \(No such"),
    ):
        with pytest.raises(DataError, match=f"tokenizer_model='.*{name}': {message}"):
            GPTSentencePieceTokenizer(str(tmp_path / name))
