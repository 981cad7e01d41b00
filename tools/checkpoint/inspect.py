#!/usr/bin/env python3
"""Print what is inside a checkpoint, without building a model.

python tools/checkpoint/inspect.py FOLDER [--step N]     the newest iteration of a --save folder, or an iter_* folder
python tools/checkpoint/inspect.py FOLDER --keys 'decoder.*weight'      only these tensors
python tools/checkpoint/inspect.py FOLDER --args --verify              all arguments; compare all checksums
"""

import sys

if __name__ == "__main__":
    # Python puts this folder first, where this file would be taken for the standard library's `inspect`.
    del sys.path[0]

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata  # noqa: E402

from megatron.core.dist_checkpointing import load_common  # noqa: E402
from megatron.core.dist_checkpointing.strategies.integrity import damaged_boxes  # noqa: E402
from megatron.core.dist_checkpointing.strategies.safe_metadata import SafeFileSystemReader  # noqa: E402
from megatron.core.errors import USER_ERRORS, CheckpointError, exit_code  # noqa: E402
from megatron.training.checkpoint_paths import folder_to_load  # noqa: E402
from megatron.training.checkpoint_state import OPTIMIZER_PREFIX, RNG_PREFIX  # noqa: E402

LAYOUT_ARGS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
)
MODEL_ARGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "seq_length",
    "padded_vocab_size",
    "untie_embeddings_and_output_weights",
    "bf16",
    "fp16",
    "fp8",
)
PARTS = ("model", "optimizer", "generators")


def find_folder(path: Path, step: int | None) -> Path:
    """The iter_* folder that `path` is, or that a run would load from it.

    Raises: CheckpointError if there is none.
    """
    if (path / ".metadata").exists() or (path / "metadata.json").exists():
        return path
    folder = folder_to_load(path, step) if path.is_dir() else None
    if folder is None:
        raise CheckpointError(
            f"{path}: no checkpoint here, neither .metadata nor latest_checkpointed_iteration.txt; name a folder that "
            "a run saved to, or an iter_* folder in it"
        )
    return folder


def part_of(key: str) -> str:
    """What a key belongs to, one of `PARTS`."""
    if key.startswith((OPTIMIZER_PREFIX, "optimizer.", "chained_")):
        return "optimizer"
    return "generators" if key.startswith((RNG_PREFIX, "rng_state")) else "model"


def num_bytes(entry: Any) -> int:
    """Bytes of a stored tensor; 0 for what is no tensor."""
    return prod(entry.size) * entry.properties.dtype.itemsize if isinstance(entry, TensorStorageMetadata) else 0


def in_units(count: int) -> str:
    """Bytes as people read them."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.2f} {units[0]}"


def describe_common(common: Mapping[str, Any], all_args: bool) -> Iterator[str]:
    """Lines about what is no tensor."""
    state, args = common["train_state"], common["args"]
    yield f"iteration    {state['iteration']}, {state['consumed_train_samples']} samples consumed"
    yield f"saved by     {common['world_size']} ranks on {common['device']}"
    for title, names in (("layout", LAYOUT_ARGS), ("model", MODEL_ARGS)):
        shown = [f"{name}={args[name]}" for name in names if args.get(name) not in (None, False)]
        yield f"{title:<12} {' '.join(shown)}"
    if all_args:
        yield from (f"  {name} = {value!r}" for name, value in sorted(args.items()))


def describe_tensors(metadata: Metadata, keys: re.Pattern[str] | None) -> Iterator[str]:
    """Lines about what each part holds, then a line for each tensor that `keys` finds."""
    entries = metadata.state_dict_metadata
    for part in PARTS:
        own = [key for key in entries if part_of(key) == part]
        size = in_units(sum(num_bytes(entries[key]) for key in own))
        yield f"{part:<12} {f'{len(own)} keys, {size}' if own else 'none'}"
    yield ""
    yield f"{'dtype':<10}{'bytes':>12} {'boxes':>6}  key [shape]"
    for key, entry in sorted(entries.items()):
        if keys is not None and not keys.search(key):
            continue
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            yield f"{dtype:<10}{num_bytes(entry):>12} {len(entry.chunks):>6}  {key} {list(entry.size)}"
        else:
            yield f"{'object':<10}{'':>12} {'':>6}  {key}"


def report(folder: Path, keys: re.Pattern[str] | None, all_args: bool) -> Iterator[str]:
    """All lines about one checkpoint.

    Raises: CheckpointError if it is incomplete or damaged.
    """
    yield f"folder       {folder}"
    if (folder / "common.json").exists():
        yield from describe_common(load_common(folder, ("train_state", "args", "world_size", "device")), all_args)
    else:
        yield "saved by     another program: no common.json, so iteration and arguments are not read"
    yield from describe_tensors(SafeFileSystemReader(folder).read_metadata(), keys)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of --save, or an iter_* folder")
    parser.add_argument("--step", type=int, help="this iteration instead of the newest")
    parser.add_argument("--keys", type=re.compile, metavar="REGEX", help="show only the tensors whose key has a match")
    parser.add_argument("--args", action="store_true", help="show all saved arguments")
    parser.add_argument("--verify", action="store_true", help="read all tensor files and compare their checksums")
    options = parser.parse_args(argv)
    try:
        folder = find_folder(options.folder, options.step)
        for line in report(folder, options.keys, options.args):
            print(line)
        if options.verify:
            damaged = list(damaged_boxes(folder, SafeFileSystemReader(folder).read_metadata()))
            if damaged:
                found = "\n".join(f"  {line}" for line in damaged)
                raise CheckpointError(f"{folder}: {len(damaged)} damaged; load an earlier iteration:\n{found}")
            print("checksums    all match")
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
