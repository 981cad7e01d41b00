"""From flags to batches."""

import argparse
import gc
import json

import pytest
import torch

from megatron.core.datasets.blended_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.splits import Split
from megatron.core.errors import DataError
from megatron.training import data_loaders, global_vars
from megatron.training.data_loaders import (
    blends_from_args,
    build_pretraining_data_loader,
    build_train_valid_test_data_iterators,
    consumed_valid_samples_at,
    core_gpt_dataset_config_from_args,
    num_samples_to_build,
)
from tests.common.token_files import ToyTokenizer, write_tokens

DEFAULTS = {
    "seed": 1234,
    "seq_length": 8,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "data_args_path": None,
    "per_split_data_args_path": None,
    "mock_data": False,
    "split": "8,1,1",
    "data_cache_path": None,
    "mmap_bin_files": True,
    "num_workers": 0,
    "num_dataset_builder_threads": 1,
    "dataloader_type": "single",
    "data_sharding": True,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "create_attention_mask_in_dataloader": True,
    "multiple_validation_sets": False,
    "full_validation": False,
    "skip_train": False,
    "train_iters": 10,
    "train_samples": None,
    "eval_iters": 2,
    "eval_interval": 5,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "eval_micro_batch_size": 1,
    "eval_global_batch_size": 2,
    "device": "cpu",
}


def arguments(**changes):
    return argparse.Namespace(**{**DEFAULTS, **changes})


@pytest.fixture(autouse=True)
def tokenizer():
    global_vars.set_tokenizer(ToyTokenizer())
    yield
    global_vars.reset()
    gc.collect()  # a loader that dies in a process forked later would keep that process waiting for its workers


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(data_loaders.parallel_state, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(data_loaders.parallel_state, "get_data_parallel_world_size", lambda: 1)


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "data", [[place % 98 for place in range(first, first + 20)] for first in range(60)])


def provider(args):
    def build(num_samples):
        config = core_gpt_dataset_config_from_args(args)
        return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()

    return build


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [40, 12, 4]),
        ({"train_iters": None, "train_samples": 37}, [37, 4, 4]),
        ({"eval_interval": 3}, [40, 16, 4]),
        ({"eval_interval": None}, [40, 4, 4]),
        ({"start_eval_at_iter": 5}, [40, 8, 4]),
        ({"full_validation": True}, [40, None, 4]),
        ({"skip_train": True}, [40, 4, 4]),
        ({"eval_iters": 0}, [40, 0, 0]),
    ],
)
def test_requests_follow_the_length_of_the_run(changes, expected):
    assert num_samples_to_build(arguments(**changes)) == expected


@pytest.mark.parametrize(
    ("iteration", "changes", "expected"),
    [(0, {}, 0), (12, {}, 8), (12, {"start_eval_at_iter": 5}, 4), (12, {"train_samples": 9}, 0)],
)
def test_consumed_validation_samples_follow_from_the_iteration(iteration, changes, expected):
    assert consumed_valid_samples_at(arguments(**changes), iteration) == expected


def test_every_form_of_source_is_read(tmp_path):
    words, blends = tmp_path / "words", tmp_path / "blends.json"
    words.write_text("0.3 a\n0.7 b\n")
    blends.write_text(json.dumps({"train": [0.3, "a", 0.7, "b"], "valid": ["c"]}))
    pair = (["a", "b"], [0.3, 0.7])
    assert blends_from_args(arguments(data_path=["0.3", "a", "0.7", "b"])) == (pair, None)
    assert blends_from_args(arguments(data_args_path=str(words))) == (pair, None)
    assert blends_from_args(arguments(mock_data=True)) == (None, None)
    expected = (None, [pair, (["c"], None), None])
    assert blends_from_args(arguments(per_split_data_args_path=str(blends))) == expected
    per_split = {"train_data_path": ["0.3", "a", "0.7", "b"], "valid_data_path": ["c"]}
    assert blends_from_args(arguments(**per_split)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON"),
        ('{"val": ["a"]}', "an object with the keys train, valid, test"),
        ('{"train": 5}', "an object"),
    ],
)
def test_malformed_file_of_blends_is_named(tmp_path, text, message):
    (tmp_path / "blends.json").write_text(text)
    with pytest.raises(DataError, match=rf"per_split_data_args_path='.*blends.json': {message}"):
        blends_from_args(arguments(per_split_data_args_path=str(tmp_path / "blends.json")))


def test_missing_file_of_words_and_missing_source_are_named():
    with pytest.raises(DataError, match=r"data_args_path='gone': the file cannot be read \(No such file"):
        blends_from_args(arguments(data_args_path="gone"))
    with pytest.raises(DataError, match="there is no source of data; set --data-path, or --mock-data"):
        blends_from_args(arguments())


@pytest.mark.parametrize(("content", "message"), [(b"", "the file is empty"), (b"\x9f\xff", "this is no text")])
def test_file_without_words_is_named(tmp_path, content, message):
    (tmp_path / "words").write_bytes(content)
    with pytest.raises(DataError, match=f"data_args_path='.*words': {message}"):
        blends_from_args(arguments(data_args_path=str(tmp_path / "words")))


def test_flags_reach_the_config(prefix):
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    args = arguments(data_path=[prefix], seed=7, data_cache_path="cache", mmap_bin_files=False, **flags)
    config = core_gpt_dataset_config_from_args(args)
    assert (config.random_seed, config.sequence_length, config.split) == (7, 8, "8,1,1")
    assert (config.path_to_cache, config.mmap_bin_files) == ("cache", False)
    assert (config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss) == (True, True, True)


@pytest.mark.parametrize(
    ("wanted", "reset", "expected"), [(True, False, False), (True, True, True), (False, True, False)]
)
def test_purely_causal_masks_are_not_shipped(prefix, wanted, reset, expected):
    args = arguments(data_path=[prefix], create_attention_mask_in_dataloader=wanted, reset_attention_mask=reset)
    assert core_gpt_dataset_config_from_args(args).create_attention_mask is expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_have_the_contracted_fields(prefix, one_rank, num_workers):
    args = arguments(data_path=[prefix], num_workers=num_workers)
    train, valid, test = build_train_valid_test_data_iterators(provider(args), args=args)
    batch = next(train)
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "tokens": ((2, 8), torch.int64),
        "labels": ((2, 8), torch.int64),
        "loss_mask": ((2, 8), torch.float32),
        "position_ids": ((2, 8), torch.int64),
    }
    assert next(valid)["tokens"].shape == next(test)["tokens"].shape == (1, 8)


def tokens_of(iterator, count):
    return [next(iterator)["tokens"].tolist() for _ in range(count)]


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_resume_continues_the_order(prefix, one_rank, dataloader_type):
    args = arguments(data_path=[prefix], dataloader_type=dataloader_type)
    whole = tokens_of(build_train_valid_test_data_iterators(provider(args), args=args)[0], 10)
    rest = build_train_valid_test_data_iterators(provider(args), consumed_train_samples=8, args=args)[0]
    assert tokens_of(rest, 6) == whole[4:]


@pytest.mark.parametrize(("mbs", "dp"), [(4, 1), (1, 2), (1, 4)])
def test_resume_in_another_layout_keeps_the_order_of_samples(prefix, mbs, dp):
    args = arguments(data_path=[prefix], micro_batch_size=mbs)
    dataset = provider(args)([40, 0, 0])[0]
    expected = [dataset[place]["tokens"].tolist() for place in range(8, 40)]
    loaders = [build_pretraining_data_loader(dataset, 8, args, rank, dp) for rank in range(dp)]
    got = []
    for batches in zip(*loaders, strict=True):
        got += [sample for batch in batches for sample in batch["tokens"].tolist()]
    assert got[:32] == expected


def test_cyclic_loader_begins_another_epoch(prefix, one_rank):
    args = arguments(data_path=[prefix], dataloader_type="cyclic", train_iters=1)
    train = build_train_valid_test_data_iterators(provider(args), args=args)[0]
    num_steps = len(provider(args)([4, 0, 0])[0]) // 2
    first, second = tokens_of(train, num_steps), tokens_of(train, num_steps)
    assert first != second
    flat = [sorted(sample for batch in epoch for sample in batch) for epoch in (first, second)]
    assert flat[0] == flat[1]


def test_full_validation_repeats_the_whole_set_one_by_one(prefix, one_rank):
    args = arguments(data_path=[prefix], full_validation=True, eval_micro_batch_size=4)
    valid = build_train_valid_test_data_iterators(provider(args), args=args)[1]
    num_samples = len(provider(args)([0, None, 0])[1])
    first, second = tokens_of(valid, num_samples), tokens_of(valid, num_samples)
    assert first == second
    assert valid.num_batches == num_samples
    assert {len(batch) for batch in first} == {1}


def test_several_validation_sets_give_a_list_of_iterators(prefix, one_rank):
    args = arguments(data_path=["1", prefix, "2", prefix], multiple_validation_sets=True)
    valid = build_train_valid_test_data_iterators(provider(args), args=args)[1]
    assert [next(iterator)["tokens"].shape for iterator in valid] == [(1, 8), (1, 8)]


def test_evaluation_only_builds_no_training_data(prefix, one_rank):
    args = arguments(data_path=[prefix], skip_train=True)
    train, valid, _ = build_train_valid_test_data_iterators(provider(args), args=args)
    assert train is None
    assert next(valid)["tokens"].shape == (1, 8)


def test_external_loader_is_taken_as_it_is():
    batches = [{"tokens": 1}]
    assert build_pretraining_data_loader(batches, 0, arguments(dataloader_type="external"), 0, 1) is batches
    assert build_pretraining_data_loader(None, 0, arguments(), 0, 1) is None


def test_evaluation_uses_its_own_micro_batch(prefix):
    dataset = provider(arguments(data_path=[prefix]))([40, 8, 0])[1]
    args = arguments(data_path=[prefix], eval_micro_batch_size=3)
    for split, expected in ((Split.valid, 3), (Split.train, 2)):
        batch = next(iter(build_pretraining_data_loader(dataset, 0, args, 0, 1, split)))
        assert len(batch["tokens"]) == expected


def test_bad_token_in_a_worker_keeps_its_message(tmp_path, one_rank, monkeypatch):
    # How long torch waits for a worker that failed before it ends it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    prefix = write_tokens(tmp_path / "bad", [[120] * 20] * 40)
    args = arguments(data_path=[prefix], num_workers=1)
    train = build_train_valid_test_data_iterators(provider(args), args=args)[0]
    with pytest.raises(DataError, match="holds token id 120, the tokenizer has 100 ids"):
        next(train)
    del train
    gc.collect()
