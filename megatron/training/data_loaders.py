"""From the arguments to the iterators that the training loop draws batches from.

A batch is a dictionary: tokens and labels int64 [mbs, s], loss_mask fp32 [mbs, s], position_ids int64 [mbs, s], and
what else the dataset adds. Order and resume are the samplers' business (core/datasets/samplers.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.samplers import (
    FullValidationSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.core.datasets.splits import Blend, Split, get_blend_from_list
from megatron.core.errors import DataError
from megatron.training.global_vars import get_args, get_tokenizer

Batch = dict[str, Any]
DataIterator = Iterator[Batch]
DatasetProvider = Callable[[list[int | None]], Sequence[Any]]


def core_gpt_dataset_config_from_args(args: argparse.Namespace) -> GPTDatasetConfig:
    """Return what the data flags say, with the tokenizer of this process.

    A mask that is only causal is not shipped: attention makes it itself, and [s, s] per sample would be most of a
    batch.
    """
    blend, blend_per_split = blends_from_args(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=ships_attention_mask(args),
        **_optional_fields(args),
    )


def ships_attention_mask(args: argparse.Namespace) -> bool:
    """Whether batches hold masks: those that hide earlier documents, if the loader is to make them."""
    return args.create_attention_mask_in_dataloader and args.reset_attention_mask


def _optional_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return fields whose flags may not be there; an absent flag leaves the field's default."""
    names = {
        "mid_level_dataset_surplus": "mid_level_dataset_surplus",
        "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens",
        "dataloader_inter_document_masking": "inter_document_masking",
    }
    return {field: getattr(args, name) for name, field in names.items() if hasattr(args, name)}


def blends_from_args(args: argparse.Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return (blend, blend per split) of the one data source that is set; both None for synthetic data.

    Raises: DataError if a file that holds the words is missing or malformed.
    """
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.mock_data:
        return None, None
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    if args.data_args_path is not None:
        blend = get_blend_from_list(_read_text("data_args_path", args.data_args_path).split())
        if blend is None:
            path = args.data_args_path
            raise DataError(f"data_args_path={path!r}: the file is empty; write the words of --data-path into it.")
        return blend, None
    if any(words is not None for words in per_split):
        return None, [get_blend_from_list(words) for words in per_split]
    if args.per_split_data_args_path is not None:
        return None, _read_blends(args.per_split_data_args_path)
    raise DataError("data_path=None: there is no source of data; set --data-path, or --mock-data for synthetic data.")


def _read_text(option: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise DataError(f"{option}={path!r}: the file cannot be read ({error.strerror}); correct the path.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{option}={path!r}: this is no text ({error}); correct the path.") from error


def _read_blends(path: str) -> list[Blend | None]:
    """Read {"train": [words], "valid": [words], "test": [words]} from a JSON file."""
    try:
        blends = json.loads(_read_text("per_split_data_args_path", path))
    except json.JSONDecodeError as error:
        raise DataError(f"per_split_data_args_path={path!r}: this is no JSON ({error}); correct the file.") from error
    names = [split.name for split in Split]
    well_formed = isinstance(blends, dict) and all(isinstance(words, list | None) for words in blends.values())
    if not well_formed or not set(blends) <= set(names):
        raise DataError(
            f"per_split_data_args_path={path!r}: an object with the keys {', '.join(names)} is expected, each "
            "with a list of words; correct the file."
        )
    return [get_blend_from_list([str(word) for word in blends.get(name) or []]) for name in names]


def num_samples_to_build(args: argparse.Namespace) -> list[int | None]:
    """Return the samples that the run takes of train, valid and test; None means one epoch."""
    start_eval_at_iter = getattr(args, "start_eval_at_iter", None) or 0
    per_evaluation = args.eval_iters * args.eval_global_batch_size
    train_iters = args.train_iters or 0
    num_train = args.train_samples or train_iters * args.global_batch_size
    num_valid: int | None = per_evaluation
    if args.full_validation:
        num_valid = None
    elif not args.skip_train and args.eval_interval:
        num_evaluations = train_iters // args.eval_interval + 1 - start_eval_at_iter // args.eval_interval
        num_valid = num_evaluations * per_evaluation
    return [num_train, num_valid, per_evaluation]


def consumed_valid_samples_at(args: argparse.Namespace, iteration: int) -> int:
    """Return the validation samples consumed before an iteration, for a checkpoint that does not say."""
    if not args.eval_interval or args.train_samples is not None:
        return 0
    start_eval_at_iter = getattr(args, "start_eval_at_iter", None) or 0
    num_evaluations = iteration // args.eval_interval - start_eval_at_iter // args.eval_interval
    return max(0, num_evaluations) * args.eval_iters * args.eval_global_batch_size


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    args: argparse.Namespace,
    dp_rank: int,
    dp_size: int,
    split: Split = Split.train,
) -> Iterable[Batch] | None:
    """Return the loader of one dataset from `consumed_samples` on; None without a dataset.

    `--dataloader-type external` takes the dataset itself as the loader.
    """
    if dataset is None or args.dataloader_type == "external":
        return dataset
    micro_batch_size = args.micro_batch_size if split is Split.train else args.eval_micro_batch_size
    sizes = {"dp_rank": dp_rank, "dp_size": dp_size}
    sampler: Any
    if split is Split.valid and args.full_validation:
        sampler = FullValidationSampler(len(dataset), 0, 1, **sizes)
    elif args.dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(
            len(dataset), consumed_samples, micro_batch_size, data_sharding=args.data_sharding, **sizes
        )
    else:
        sampler = MegatronPretrainingSampler(len(dataset), consumed_samples, micro_batch_size, **sizes)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=torch.cuda.is_available() and args.device != "cpu",
        persistent_workers=args.num_workers > 0,
        worker_init_fn=_limit_threads if args.num_workers else None,
        generator=torch.Generator().manual_seed(args.seed),  # else every epoch would draw from the model's generator
    )


def _limit_threads(worker: int) -> None:
    """Give each loader process one thread; samples are too small to share one."""
    torch.set_num_threads(1)


def _repeat(loader: Iterable[Batch]) -> DataIterator:
    """Draw from a loader for ever; each pass is an epoch."""
    while True:
        yield from loader


def _once(loader: Iterable[Batch]) -> DataIterator:
    """Draw from a loader until it is empty; its workers start with the first draw, on ranks that need data."""
    yield from loader


class WholeSet:
    """Draws the batches of one validation set again and again; `num_batches` make a pass, on every rank alike."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.num_batches = len(loader)
        self._batches = _repeat(loader)

    def __iter__(self) -> WholeSet:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)


def _iterate(loader: Iterable[Batch] | None, args: argparse.Namespace, split: Split) -> DataIterator | None:
    if loader is None:
        return None
    if isinstance(loader, DataLoader) and split is Split.valid and args.full_validation:
        return WholeSet(loader)
    return _repeat(loader) if args.dataloader_type == "cyclic" else _once(loader)


def build_train_valid_test_data_iterators(
    provider: DatasetProvider,
    consumed_train_samples: int = 0,
    consumed_valid_samples: int = 0,
    args: argparse.Namespace | None = None,
) -> list[Any]:
    """Return the iterators of train, valid and test; None where there is no data.

    With several validation sets the second is a list of iterators. The provider gets the three sample counts.
    """
    args = get_args() if args is None else args
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    num_samples = num_samples_to_build(args)
    if args.skip_train:
        num_samples[0] = 0
    consumed = [consumed_train_samples, consumed_valid_samples, 0]
    iterators: list[Any] = []
    for split, dataset, start in zip(Split, provider(num_samples), consumed, strict=True):
        if dataset is None and split is Split.train and not args.skip_train:
            raise DataError(
                f"split={args.split!r}: no data for training; give the train split a share, or set --train-data-path."
            )
        several = dataset if isinstance(dataset, list) else [dataset]
        loaders = [build_pretraining_data_loader(one, start, args, dp_rank, dp_size, split) for one in several]
        drawn = [_iterate(loader, args, split) for loader in loaders]
        iterators.append(drawn if isinstance(dataset, list) else drawn[0])
    return iterators
