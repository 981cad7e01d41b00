"""A word-level tokenizer saved by the transformers library."""

import pytest

from megatron.core.errors import DataError
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    words = {word: place for place, word in enumerate(["<unk>", "</s>", "the", "fox", "dog"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    fast.add_tokens(["<extra>"])
    fast.save_pretrained(path)
    return str(path)


def test_words_become_ids_and_eos_ends_a_document(folder):
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.tokenize("the dog the cat") == [2, 4, 2, 0]
    assert tokenizer.detokenize([2, 3]) == "the fox"
    assert tokenizer.special_ids() == {"eod": 1, "eos": 1, "unk": 0}


def test_added_tokens_count(folder):
    assert HuggingFaceTokenizer(folder).vocab_size == 6


def test_folder_without_a_tokenizer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=rf"tokenizer_model='{tmp_path}': it cannot be loaded"):
        HuggingFaceTokenizer(str(tmp_path))
