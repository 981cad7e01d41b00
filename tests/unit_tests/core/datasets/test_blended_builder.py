"""Every form of data source, on one rank and on two."""

import dataclasses
import os

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.datasets.blended_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.splits import Split
from megatron.core.errors import ConfigError, DataError
from tests.common.token_files import gpt_config, write_tokens


def documents(count, first=0):
    return [[(first + place) % 98 + 1 for place in range(9)] for _ in range(count)]


@pytest.fixture
def prefixes(tmp_path):
    return [write_tokens(tmp_path / name, documents(count)) for name, count in (("a", 40), ("b", 20))]


def build(sizes, cls=GPTDataset, **options):
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, gpt_config(**options)).build()


def test_one_prefix_is_divided_by_the_split(prefixes):
    train, valid, test = build([None, None, None], blend=([prefixes[0]], None), split="2,1,1")
    assert [type(part) for part in (train, valid, test)] == [GPTDataset] * 3
    assert [len(part.indices) for part in (train, valid, test)] == [20, 10, 10]
    assert np.concatenate([part.indices for part in (train, valid, test)]).tolist() == list(range(40))
    assert [part.index_split for part in (train, valid, test)] == list(Split)


def test_split_without_share_and_size_zero_give_no_dataset(prefixes):
    train, valid, test = build([5, 0, 7], blend=([prefixes[0]], None), split="1,1,0")
    assert len(train) >= 5
    assert (valid, test) == (None, None)


def test_size_zero_gives_no_dataset_in_a_blend_and_in_mock_data(prefixes):
    assert build([0, 0, 0], blend=(prefixes, [1.0, 1.0]), split="1,1,1") == [None] * 3
    assert build([0, 0, 0], cls=MockGPTDataset, blend=None, split=None) == [None] * 3


def test_weighted_blend_counts_by_weight_with_surplus(prefixes):
    train = build([150, 0, 0], blend=(prefixes, [3.0, 1.0]), split="1,0,0")[0]
    assert isinstance(train, BlendedDataset)
    assert train.weights == [0.75, 0.25]
    assert len(train) == 113 + 38
    assert [part.num_samples for part in train.datasets] == [114, 39]
    counts = np.bincount([train[i]["dataset_id"] for i in range(len(train))])
    assert counts.tolist() == [113, 38]


def test_blend_without_weights_is_one_epoch_cut_to_the_request(prefixes):
    whole = build([None, 0, 0], blend=(prefixes, None), split="1,0,0")[0]
    assert len(whole) == sum(len(part) for part in whole.datasets) == 44 + 22
    part = build([10, 0, 0], blend=(prefixes, None), split="1,0,0")[0]
    assert len(part) == 10
    assert part.size == 10


def test_blend_without_weights_says_when_the_request_is_larger(prefixes, caplog):
    with caplog.at_level("WARNING", logger="megatron"):
        train = build([1000, 0, 0], blend=(prefixes, None), split="1,0,0")[0]
    assert len(train) == 66
    assert "1000 samples are wanted, a blend without weights has one epoch of 66" in caplog.text


def test_one_epoch_of_a_weighted_blend_takes_every_sample_once(prefixes):
    train = build([None, 0, 0], blend=(prefixes, [3.0, 1.0]), split="1,0,0")[0]
    taken = set(zip(train.dataset_index.tolist(), train.dataset_sample_index.tolist(), strict=True))
    assert len(taken) == len(train) == 66


def test_blend_per_split_takes_files_whole(prefixes):
    per_split = [([prefixes[0]], None), (prefixes, [1.0, 1.0]), None]
    train, valid, test = build([5, 6, 7], blend=None, split=None, blend_per_split=per_split)
    assert len(train.indices) == 40
    assert [len(part.indices) for part in valid.datasets] == [40, 20]
    assert len(valid) == 6
    assert test is None


def test_several_validation_sets_stay_apart_at_full_size(prefixes):
    train, valid, _ = build([50, 6, 0], blend=(prefixes, [3.0, 1.0]), split="1,1,0", multiple_validation_sets=True)
    assert isinstance(train, BlendedDataset)
    assert [part.dataset_path for part in valid] == prefixes
    assert [part.num_samples for part in valid] == [6, 6]


def test_full_validation_is_one_epoch(prefixes):
    valid = build([5, None, 0], blend=([prefixes[0]], None), split="1,1,0", full_validation=True)[1]
    assert len(valid) == 22


def test_mock_data_has_three_splits():
    train, valid, test = build([10, 5, 5], cls=MockGPTDataset, blend=None, split=None, sequence_length=4096)
    assert [len(part.indices) for part in (train, valid, test)] == [33333, 33334, 33333]


def test_rank_without_need_builds_nothing(tmp_path):
    config = gpt_config(blend=([str(tmp_path / "missing")], None))
    assert BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: False, config).build() == [None] * 3


def test_threads_build_the_same_blend(prefixes):
    one = build([150, 0, 0], blend=(prefixes, [3.0, 1.0]), split="1,0,0")[0]
    two = build([150, 0, 0], blend=(prefixes, [3.0, 1.0]), split="1,0,0", num_dataset_builder_threads=2)[0]
    assert one.unique_description == two.unique_description
    assert one.dataset_index.tolist() == two.dataset_index.tolist()


def test_blend_indices_are_cached(prefixes, tmp_path):
    options = {"blend": (prefixes, [3.0, 1.0]), "split": "1,0,0", "path_to_cache": str(tmp_path / "cache")}
    blend = build([150, 0, 0], **options)[0]
    stem = f"{blend.unique_description_hash}-BlendedDataset-train-"
    names = {name for name in os.listdir(tmp_path / "cache") if "Blended" in name}
    assert names == {stem + end for end in ("description.txt", "dataset_index.npy", "dataset_sample_index.npy")}
    again = build([150, 0, 0], **options)[0]
    assert isinstance(again.dataset_index, np.memmap)
    assert again.dataset_index.tolist() == blend.dataset_index.tolist()


def test_order_that_asks_too_much_is_an_index_error(prefixes):
    dataset = build([10, 0, 0], blend=([prefixes[1]], None), split="1,0,0")[0]
    with pytest.raises(IndexError, match=r"the blend asks for 100 samples, the dataset has 22; raise mid_level"):
        BlendedDataset([dataset, dataset], [1.0, 1.0], 200, dataset.config)


def test_empty_corpus_is_named(tmp_path):
    prefix = write_tokens(tmp_path / "empty", [[], []])
    with pytest.raises(DataError, match=r"empty': the index is empty"):
        build([5, 0, 0], blend=([prefix], None), split="1,0,0")


@pytest.mark.timeout(5)
def test_empty_split_is_named_at_once(prefixes):
    with pytest.raises(DataError, match=r"its test split has 0 of 40 sequences and no token \(split='98,1\.5,0\.5'\)"):
        build([5, 5, 5], blend=([prefixes[0]], None), split="98,1.5,0.5")


def test_two_sources_are_refused(prefixes):
    with pytest.raises(ConfigError, match="blend and blend_per_split are both set"):
        gpt_config(blend=([prefixes[0]], None), blend_per_split=[None, None, None])
    with pytest.raises(ConfigError, match=r"split='1,1,1' with a blend per split"):
        gpt_config(blend=None, blend_per_split=[None, None, None], split="1,1,1")


def test_weights_without_sense_are_refused(prefixes):
    with pytest.raises(DataError, match=r"data_path: weight -1\.0 of .* must be a finite number above zero"):
        gpt_config(blend=(prefixes, [2.0, -1.0]))
    with pytest.raises(DataError, match=r"valid_data_path: weight 0\.0"):
        gpt_config(blend=None, split=None, blend_per_split=[None, (prefixes, [0.0, 1.0]), None])


def test_extra_first_field_leaves_the_others_alone(prefixes):
    blend = build([20, 0, 0], blend=(prefixes, [1.0, 1.0]), split="1,0,0")[0]
    item = blend[3]
    plain = blend.datasets[item["dataset_id"]][int(blend.dataset_sample_index[3])]
    assert next(iter(item)) == "dataset_id"
    assert all(np.array_equal(item[name], plain[name]) for name in plain)


def build_on_rank(prefix, cache_folders, local_ranks):
    """Build on one rank of a small world; returns the order and how often this rank wrote an index."""
    config = gpt_config(blend=([prefix], None), path_to_cache=cache_folders[dist.get_rank()])
    written = []
    store = IndexCache.store
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(local_ranks[dist.get_rank()]))
        patch.setattr(IndexCache, "store", lambda cache, arrays: (written.append(cache.folder), store(cache, arrays)))
        train = BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, config).build()[0]
    return train.shuffle_index.tolist(), len(written)


@pytest.mark.parametrize("local_ranks", [(0, 0), (0, 1)], ids=["two nodes", "one node"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own folders", "shared folder"])
def test_each_cache_folder_is_written_once(pool, prefixes, tmp_path, local_ranks, is_shared):
    folders = [str(tmp_path / ("cache" if is_shared else f"cache{rank}")) for rank in range(2)]
    (order0, written0), (order1, written1) = pool.run(build_on_rank, prefixes[0], folders, local_ranks, world_size=2)
    assert order0 == order1
    assert (written0, written1) == (1, 0 if is_shared else 1)
    for folder in set(folders):
        assert len(os.listdir(folder)) == 4


def fail_on_rank_0(prefix):
    """Build where rank 0 misses its file."""
    name = prefix + ("missing" if dist.get_rank() == 0 else "")
    config = gpt_config(blend=([name], None))
    try:
        BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, config).build()
    except DataError as error:
        return str(error)
    return "no error"


def test_error_of_one_rank_reaches_all(pool, prefixes):
    own, other = pool.run(fail_on_rank_0, prefixes[0], world_size=2)
    assert "amissing.idx': there is no such index" in own
    assert other.startswith("rank 0: data_path=")


def test_config_has_upstream_field_names():
    names = {field.name for field in dataclasses.fields(gpt_config())}
    assert names >= {"blend", "blend_per_split", "split", "path_to_cache", "mmap_bin_files", "reset_position_ids"}
