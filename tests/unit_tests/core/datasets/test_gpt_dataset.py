"""Items of a GPT dataset: tokens, labels and masks."""

import numpy as np
import pytest
import torch

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock_gpt import MockGPTLowLevelDataset
from megatron.core.datasets.splits import Split
from megatron.core.errors import ConfigError, DataError
from tests.common.token_files import ToyTokenizer, gpt_config, gpt_dataset, vector_documents, write_tokens


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "data", vector_documents())


ITEMS = {
    (8, None, 1234): ([*range(8, 16)], [*range(9, 16), 99]),
    (8, 4, 1234): ([99, 5, 6, 99, 25, 26, 27, 99], [5, 6, 99, 25, 26, 27, 99, 0]),
    (4, 13, 7): ([19, 20, 21, 22], [20, 21, 22, 23]),
}


@pytest.mark.parametrize("key", ITEMS, ids=str)
@pytest.mark.parametrize("mmap", [True, False])
def test_item_equals_the_published_vector(prefix, key, mmap):
    s, n, seed = key
    item = gpt_dataset(prefix, n, sequence_length=s, seed=seed, mmap_bin_files=mmap)[0]
    assert (item["tokens"].tolist(), item["labels"].tolist()) == ITEMS[key]
    assert item["loss_mask"].tolist() == [1.0] * s
    assert item["position_ids"].tolist() == list(range(s))
    dtypes = [item[name].dtype for name in ("tokens", "labels", "loss_mask", "position_ids")]
    assert dtypes == [torch.int64, torch.int64, torch.float32, torch.int64]


def test_neighbours_share_one_token_and_join_to_the_stream(prefix):
    dataset = gpt_dataset(prefix, 10)
    documents = vector_documents()
    stream = [token for document in dataset.document_index.tolist() for token in documents[document]]
    in_order = sorted(range(len(dataset)), key=lambda idx: dataset.shuffle_index[idx])
    items = [dataset[idx] for idx in in_order]
    assert [token for item in items for token in item["tokens"].tolist()] == stream[:80]
    assert [token for item in items for token in item["labels"].tolist()] == stream[1:81]


PAD = 50
PADDED = [PAD if place in (3, 9, 10, 16, 22, 24, 25, 27, 31) else place for place in range(33)]


@pytest.mark.parametrize("order", [(0, 5, 0), (5, 0, 5)])
def test_masks_do_not_leak_between_items(tmp_path, order):
    prefix = write_tokens(tmp_path / "padded", [PADDED])
    options = {"tokenizer": ToyTokenizer(pad=PAD), "sequence_length": 4, "create_attention_mask": True}
    fresh = {idx: gpt_dataset(prefix, **options)[idx] for idx in (0, 5)}
    assert 0 < fresh[0]["loss_mask"].sum() < 4
    assert fresh[0]["loss_mask"].tolist() != fresh[5]["loss_mask"].tolist()
    dataset = gpt_dataset(prefix, **options)
    for idx in order:
        item = dataset[idx]
        for name, value in fresh[idx].items():
            assert torch.equal(item[name], value), (idx, name)
        for value in item.values():
            value.fill_(0)
    assert torch.equal(dataset[order[0]]["loss_mask"], fresh[order[0]]["loss_mask"])


def one_sample(tmp_path, tokenizer, **options):
    prefix = write_tokens(tmp_path / "one", [[4, 5, 7, 6, 7]])
    return gpt_dataset(prefix, tokenizer=tokenizer, sequence_length=4, **options)[0]


def test_pad_equal_to_eod_masks_nothing(tmp_path):
    item = one_sample(tmp_path, ToyTokenizer(10, eod=7, pad=7))
    assert item["labels"].tolist() == [5, 7, 6, 7]
    assert item["loss_mask"].tolist() == [1, 1, 1, 1]


def test_pad_equal_to_eod_with_eod_masking_masks_the_input_eod(tmp_path):
    item = one_sample(tmp_path, ToyTokenizer(10, eod=7, pad=7), eod_mask_loss=True)
    assert item["loss_mask"].tolist() == [1, 1, 0, 1]


def test_ambiguous_pad_masks_when_allowed(tmp_path):
    item = one_sample(tmp_path, ToyTokenizer(10, eod=7, pad=7), allow_ambiguous_pad_tokens=True)
    assert item["labels"].tolist() == [5, 0, 6, 0]
    assert item["tokens"].tolist() == [4, 5, 0, 6]
    assert item["loss_mask"].tolist() == [1, 0, 1, 0]


def test_pad_outside_of_the_vocabulary_never_reaches_the_embedding(tmp_path):
    prefix = write_tokens(tmp_path / "one", [[300, 300, 4, 6, 7]])
    item = gpt_dataset(prefix, tokenizer=ToyTokenizer(10, eod=9, pad=300), sequence_length=4)[0]
    assert item["tokens"].tolist() == [0, 0, 4, 6]
    assert item["labels"].tolist() == [0, 4, 6, 7]
    assert item["loss_mask"].tolist() == [0, 1, 1, 1]


def test_fields_of_an_item_do_not_share_memory(prefix):
    item = gpt_dataset(prefix)[0]
    item["tokens"].fill_(77)
    assert item["labels"].tolist() == [*range(9, 16), 99]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_token_outside_of_the_vocabulary_is_named(tmp_path, place):
    document = [1, 2, 3, 4, 5]
    document[place] = 10
    dataset = gpt_dataset(write_tokens(tmp_path / "one", [document]), tokenizer=ToyTokenizer(10), sequence_length=4)
    with pytest.raises(DataError, match=r"holds token id 10, the tokenizer has 10 ids.*preprocess_data"):
        dataset[0]


def test_negative_token_is_named(tmp_path):
    prefix = write_tokens(tmp_path / "one", [[1, -2, 3, 4, 5]], dtype=np.int32)
    with pytest.raises(DataError, match="holds token id -2"):
        gpt_dataset(prefix, tokenizer=ToyTokenizer(10), sequence_length=4)[0]


def test_reset_options_reach_the_sample(tmp_path):
    prefix = write_tokens(tmp_path / "one", [[1, 9, 2, 3, 9, 4]])
    options = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    dataset = gpt_dataset(prefix, tokenizer=ToyTokenizer(10), sequence_length=5, create_attention_mask=True, **options)
    item = dataset[0]
    assert item["position_ids"].tolist() == [0, 1, 0, 1, 2]
    assert item["loss_mask"].tolist() == [1, 0, 1, 1, 0]
    assert item["attention_mask"].shape == (1, 5, 5)
    assert item["attention_mask"][0, 3].tolist() == [True, True, False, False, True]


def test_kept_tail_is_padded_and_masked(tmp_path):
    prefix = write_tokens(tmp_path / "one", [[1, 2, 3, 4, 5, 6]])
    options = {"sequence_length": 4, "drop_last_partial_validation_sequence": False}
    dataset = gpt_dataset(prefix, index_split=Split.valid, **options)
    assert len(dataset) == 2
    short = dataset[int(np.argmax(dataset.shuffle_index))]
    assert short["tokens"].tolist() == [5, 6, 0, 0]
    assert short["labels"].tolist() == [6, 0, 0, 0]
    assert short["loss_mask"].tolist() == [1, 0, 0, 0]
    assert len(gpt_dataset(prefix, index_split=Split.train, **options)) == 1


def test_without_extra_token_the_last_label_has_no_loss(tmp_path):
    prefix = write_tokens(tmp_path / "one", [[1, 2, 3], [4, 5]])
    dataset = gpt_dataset(prefix, add_extra_token_to_sequence=False, sequence_length=5)
    item = dataset[0]
    assert sorted(item["tokens"].tolist()) == [1, 2, 3, 4, 5]
    assert item["labels"].tolist() == [*item["tokens"].tolist()[1:], 0]
    assert item["loss_mask"].tolist() == [1, 1, 1, 1, 0]


def test_document_parts_are_shipped_instead_of_a_mask(prefix):
    item = gpt_dataset(prefix, 4, create_attention_mask=True, inter_document_masking=True)[0]
    # 99 | 5 6 99 | 25 26 27 99, and the label 0 begins another document
    assert item["cu_seqlens"].tolist() == [0, 1, 4, 8, 8, 8, 8, 8, 8]
    assert item["max_seqlen"].item() == 4
    assert item["position_ids"].tolist() == [0, 0, 1, 2, 0, 1, 2, 3]
    assert "attention_mask" not in item


def test_part_without_an_input_token_is_no_part(tmp_path):
    prefix = write_tokens(tmp_path / "two", [[1, 2, 3, 4], [5]])
    dataset = gpt_dataset(prefix, sequence_length=4, inter_document_masking=True, seed=0)
    item = dataset[0]
    lengths = torch.diff(item["cu_seqlens"]).tolist()
    expected = [4, 0, 0, 0] if item["tokens"].tolist() == [1, 2, 3, 4] else [1, 3, 0, 0]
    assert lengths == expected


def test_as_many_parts_as_tokens_fit(tmp_path):
    prefix = write_tokens(tmp_path / "ones", [[token] for token in range(1, 10)])
    item = gpt_dataset(prefix, sequence_length=4, inter_document_masking=True)[0]
    assert item["cu_seqlens"].tolist() == [0, 1, 2, 3, 4]
    assert item["position_ids"].tolist() == [0, 0, 0, 0]


def test_stand_in_item_has_no_loss(prefix):
    item = gpt_dataset(prefix)[None]
    assert item["loss_mask"].tolist() == [0.0] * 8
    assert item["tokens"].tolist() == list(range(8, 16))


@pytest.mark.timeout(5)
def test_split_without_tokens_is_refused_at_once(prefix):
    low_level = IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"its test split has 0 of 6 sequences and no token \(split='1,0,0'\)"):
        GPTDataset(low_level, prefix, np.arange(0, dtype=np.int32), 5, Split.test, gpt_config())


def test_data_shorter_than_a_sample_is_refused_with_both_numbers(prefix):
    with pytest.raises(DataError, match=r"has 29 tokens, one sample needs sequence_length=29 \+ 1"):
        gpt_dataset(prefix, sequence_length=29)


def test_short_data_is_read_over_and_over_when_samples_are_requested(prefix):
    assert len(gpt_dataset(prefix, 3, sequence_length=29)) == 3


def test_tokenizer_is_required():
    with pytest.raises(ConfigError, match="tokenizer=None"):
        GPTDatasetConfig(random_seed=1, sequence_length=8)


def test_document_masking_excludes_resets():
    with pytest.raises(ConfigError, match="dataloader_inter_document_masking=True with reset_position_ids"):
        gpt_config(inter_document_masking=True, reset_position_ids=True)


def test_mock_documents_have_the_published_lengths_and_tokens():
    documents = MockGPTLowLevelDataset(vocab_size=100, eod=99)
    assert documents.sequence_lengths[:8].tolist() == [3484, 2609, 2094, 1105, 1261, 168, 309, 68]
    assert documents.sequence_lengths.sum(dtype=np.int64) == 204637097
    assert documents.sequence_lengths.max() == 4095
    assert documents[7].tolist() == [*range(1, 68), 99]
    assert documents.get(5, 98, 4).tolist() == [99, 0, 1, 2]
    assert documents.get(5, 166, 2).tolist() == [67, 99]


def test_mock_dataset_needs_no_file_and_no_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = GPTDatasetConfig(1234, 16, tokenizer=ToyTokenizer(), create_attention_mask=False)
    assert config.split == "1,1,1"
    documents = MockGPTDataset.build_low_level_dataset(None, config)
    dataset = MockGPTDataset(documents, None, np.arange(10, dtype=np.int32), 20, Split.train, config)
    assert dataset[3]["tokens"].shape == (16,)
    assert list(tmp_path.iterdir()) == []
