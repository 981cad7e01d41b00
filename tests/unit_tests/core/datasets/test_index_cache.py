"""The index cache: complete entries only, whatever was killed or changed."""

import os

import numpy as np
import pytest

from megatron.core.datasets import index_cache
from megatron.core.datasets.index_cache import IndexCache, load_or_build
from megatron.core.errors import DataError
from tests.common.token_files import ToyTokenizer, gpt_dataset, vector_documents, write_tokens

ARRAYS = {"a": np.arange(5), "b": np.ones((2, 2), dtype=np.int16)}
FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")


@pytest.fixture
def cache(tmp_path):
    return IndexCache(str(tmp_path / "cache"), '{"x": 1}', "Stem-train", ("a", "b"))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_names_carry_the_md5_of_the_description(cache, tmp_path):
    cache.store(ARRAYS)
    md5 = "27958648a9e57fcd66ae5e31ff3359e9"
    names = [f"{md5}-Stem-train-{name}" for name in ("a.npy", "b.npy", "description.txt")]
    assert sorted(files(tmp_path / "cache")) == names


def test_stored_arrays_come_back_as_memory_maps(cache):
    cache.store(ARRAYS)
    loaded = cache.load()
    assert isinstance(loaded["a"], np.memmap)
    assert [loaded[name].tolist() for name in "ab"] == [[0, 1, 2, 3, 4], [[1, 1], [1, 1]]]


@pytest.mark.parametrize("name", ["description.txt", "a.npy", "b.npy"])
def test_entry_without_one_of_its_files_is_no_hit(cache, name):
    cache.store(ARRAYS)
    os.remove(cache.path(name))
    assert cache.load() is None


@pytest.mark.parametrize("size", [0, 10, 130])
def test_truncated_array_is_no_hit(cache, size):
    cache.store(ARRAYS)
    os.truncate(cache.path("a.npy"), size)
    assert cache.load() is None


def test_entry_of_another_description_is_no_hit(cache):
    cache.store(ARRAYS)
    with open(cache.path("description.txt"), "w") as stream:
        stream.write("another")
    assert cache.load() is None


def test_refused_entry_is_built_again(cache):
    cache.store(ARRAYS)
    arrays, is_hit = load_or_build(cache, lambda: {**ARRAYS, "a": np.arange(7)}, lambda found: len(found["a"]) == 7)
    assert not is_hit
    assert cache.load()["a"].tolist() == arrays["a"].tolist() == list(range(7))


def test_hit_builds_nothing(cache):
    cache.store(ARRAYS)
    arrays, is_hit = load_or_build(cache, lambda: pytest.fail("built"), lambda found: True)
    assert is_hit
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4]


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    cache = IndexCache(str(tmp_path / "file" / "cache"), "d", "s", ("a",))
    with pytest.raises(DataError, match=r"data_cache_path='.*/file/cache': the index cache cannot be written"):
        cache.store({"a": np.arange(2)})


@pytest.mark.parametrize("kill_at", range(8))
def test_builder_killed_at_any_write_leaves_what_the_next_start_repairs(tmp_path, monkeypatch, kill_at):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    gpt_dataset(prefix, path_to_cache=str(tmp_path / "clean"))
    calls = []

    def killed(real):
        def call(*args):
            calls.append(real)
            if len(calls) > kill_at:
                raise KeyboardInterrupt
            return real(*args)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(index_cache.os, name, killed(getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            gpt_dataset(prefix, path_to_cache=str(tmp_path / "cache"))
    gpt_dataset(prefix, path_to_cache=str(tmp_path / "cache"))
    built = {name: raw for name, raw in files(tmp_path / "cache").items() if ".tmp." not in name}
    assert built == files(tmp_path / "clean")


def test_files_are_named_after_class_split_and_array(tmp_path):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    dataset = gpt_dataset(prefix)
    folder = tmp_path / "data" / "cache" / "GPTDataset_indices"
    stem = f"{dataset.unique_description_hash}-GPTDataset-train-"
    assert sorted(files(folder)) == [stem + name for name in FILES]


def test_seed_split_length_and_tokenizer_are_in_the_key(tmp_path):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    changes = [{}, {"seed": 2}, {"split": "2,1,0"}, {"sequence_length": 4}, {"tokenizer": ToyTokenizer(101)}]
    hashes = {gpt_dataset(prefix, **change).unique_description_hash for change in changes}
    assert len(hashes) == 5


def test_key_does_not_depend_on_where_the_cache_is(tmp_path):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    one = gpt_dataset(prefix, path_to_cache=str(tmp_path / "one"))
    two = gpt_dataset(prefix, path_to_cache=str(tmp_path / "two"))
    assert one.unique_description == two.unique_description


def test_description_has_the_documented_fields_in_order(tmp_path):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    names = ["class", "dataset_path", "num_samples", "index_split"]
    names += ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]
    assert list(gpt_dataset(prefix).unique_identifiers) == names
    assert gpt_dataset(prefix).unique_description.startswith('{\n    "class": "GPTDataset",\n    "dataset_path": "')


def test_internal_options_are_in_the_key_where_they_act(tmp_path):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    plain = gpt_dataset(prefix).unique_description_hash
    assert gpt_dataset(prefix, add_extra_token_to_sequence=False).unique_description_hash != plain


def test_data_written_again_under_its_name_is_not_served_stale(tmp_path):
    prefix = write_tokens(tmp_path / "data", vector_documents())
    gpt_dataset(prefix)
    write_tokens(tmp_path / "data", vector_documents((50, 60)))
    assert len(gpt_dataset(prefix)) == 13
