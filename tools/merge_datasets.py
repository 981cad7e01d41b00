#!/usr/bin/env python3
"""Join `.bin`/`.idx` files of one tokenizer: `merge_datasets.py --input A B ... --output-prefix P`.

An input is a prefix, or a folder whose prefixes are taken in the order of their names. Documents keep their order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexReader, get_bin_path, get_idx_path
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.errors import USER_ERRORS, DataError, exit_code


def find_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes that the inputs name.

    Raises: DataError if a folder holds none, or a file has no partner.
    """
    prefixes: list[str] = []
    for name in inputs:
        folder = Path(name)
        if not folder.is_dir():
            prefixes.append(name)
            continue
        found = sorted({str(path.with_suffix("")) for path in folder.iterdir() if path.suffix in (".bin", ".idx")})
        if not found:
            raise DataError(f"input={name!r}: there are no .bin and .idx files in this folder; name another.")
        prefixes += found
    for prefix in prefixes:
        if not IndexedDataset.exists(prefix):
            raise DataError(
                f"input={prefix!r}: {get_bin_path(prefix)} and {get_idx_path(prefix)} must both be there; "
                "copy the missing one."
            )
    return prefixes


def merge(inputs: Sequence[str], output_prefix: str) -> int:
    """Write the joined files and return the number of documents."""
    prefixes = find_prefixes(inputs)
    if output_prefix in prefixes:
        raise DataError(f"output_prefix={output_prefix!r}: it is also an input and would be overwritten; name another.")
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(output_prefix), dtype=IndexReader(get_idx_path(prefixes[0])).dtype)
    for prefix in tqdm(prefixes, unit=" files", disable=not sys.stderr.isatty()):
        builder.add_index(prefix)
    builder.finalize(get_idx_path(output_prefix))
    return len(IndexReader(get_idx_path(output_prefix)).document_indices) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; an error of the user is a message and an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help="prefixes or folders")
    parser.add_argument("--output-prefix", required=True, help="path of the files to write, without suffix")
    args = parser.parse_args(argv)
    try:
        num_documents = merge(args.input, args.output_prefix)
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    print(f"{num_documents} documents: {args.output_prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
