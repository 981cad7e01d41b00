#!/usr/bin/env python3
"""Turn text into `.bin`/`.idx` files: `preprocess_data.py --input F --output-prefix P --tokenizer-type T --workers N`.

Input is JSON lines, one document a line (`--json-keys` picks the texts in it), or plain text, where blank lines
separate documents. Each key K becomes `<prefix>_K_document.bin` and `.idx`, the same files for any number of workers.
An empty text leaves a document without tokens: a repeated border in the index and no sequence, also under
--append-eod.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.indexed_dataset import get_bin_path, get_idx_path, optimal_dtype
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.errors import USER_ERRORS, ConfigError, DataError, exit_code
from megatron.core.tokenizers import MegatronTokenizer, build_tokenizer
from megatron.core.tokenizers.registry import KINDS

TASK_CHARACTERS = 1 << 18
"""Text of one task: large enough that starting and sending it costs little beside tokenizing it."""

TEXT_SUFFIXES = (".txt", ".text", ".md")

Encoded = list[tuple[np.ndarray, np.ndarray]]
"""For each key the tokens [n] of a portion of documents, and their number in each document, int32 [D]."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="JSON lines or plain text")
    parser.add_argument("--input-format", choices=("auto", "jsonl", "text"), default="auto", help="auto: by the suffix")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys of a line that hold texts")
    parser.add_argument("--output-prefix", required=True, help="path of the files to write, without suffix")
    parser.add_argument("--append-eod", action="store_true", help="end each document that has tokens with EOD")
    parser.add_argument("--workers", type=int, required=True, help="tokenizer processes")
    parser.add_argument("--max-documents", type=int, default=None, help="stop after this many documents")
    parser.add_argument("--log-interval", type=int, default=10000, help="documents between lines where no terminal is")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, choices=tuple(KINDS))
    group.add_argument("--tokenizer-model", default=None, help="file, folder or name")
    group.add_argument("--vocab-file", default=None, help="vocabulary of GPT2BPETokenizer")
    group.add_argument("--merge-file", default=None, help="merges of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, default=None, help="size for NullTokenizer and TikTokenizer")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), default=None)
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    group.add_argument("--trust-remote-code", action="store_true", help="allow code of a HuggingFace tokenizer")
    args = parser.parse_args(argv)
    args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, args.padded_vocab_size = 1, 1, None
    if args.workers < 1:
        raise ConfigError(f"workers={args.workers}: at least one process tokenizes; set --workers to 1 or more.")
    return args


def read_documents(path: str, input_format: str) -> Iterator[str]:
    """Yield one document at a time: a line of JSON, or a block of plain text with its final newline.

    Raises: DataError if the file cannot be read or is no UTF-8 text.
    """
    if not os.access(path, os.R_OK) or os.path.isdir(path):
        raise DataError(f"input={path!r}: there is no such file, or it is not readable; correct the path.")
    try:
        yield from _read_text(path, input_format)
    except UnicodeDecodeError as error:
        raise DataError(f"input={path!r}: this is no UTF-8 text ({error}); convert it first.") from error


def _read_text(path: str, input_format: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as stream:
        if input_format == "jsonl":
            yield from stream
            return
        block: list[str] = []
        for line in stream:
            if line.strip():
                block.append(line)
            elif block:
                yield "".join(block)
                block = []
        if block:
            yield "".join(block)


class Encoder:
    """Turns documents into token arrays; each worker process holds one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer: MegatronTokenizer = build_tokenizer(args)
        self.is_json = args.input_format == "jsonl"
        self.keys = args.json_keys
        self.eod = self.tokenizer.eod if args.append_eod else None
        self.dtype = np.dtype(optimal_dtype(self.tokenizer.vocab_size))
        self.end = np.array([] if self.eod is None else [self.eod], dtype=self.dtype)

    def encode(self, numbered: tuple[int, list[str]]) -> Encoded:
        """Return, for each key, the tokens of a task's documents in a row: few large arrays are cheap to send."""
        first, documents = numbered
        texts = [self._texts(first + place, document) for place, document in enumerate(documents)]
        return [self._encode_texts(column) for column in zip(*texts, strict=True)]

    def _encode_texts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        arrays, lengths = [], np.zeros(len(texts), dtype=np.int32)
        for place, text in enumerate(texts):
            tokens = self.tokenizer.tokenize_array(text, self.dtype)
            lengths[place] = len(tokens)
            arrays.append(tokens)
            if len(tokens) and self.eod is not None:
                lengths[place] += 1
                arrays.append(self.end)
        return np.concatenate(arrays), lengths

    def _texts(self, number: int, line: str) -> list[str]:
        if not self.is_json:
            return [line]
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"input line {number + 1}: this is no JSON ({error}); use --input-format text for plain text."
            ) from error
        missing = [key for key in self.keys if not isinstance(record, dict) or not isinstance(record.get(key), str)]
        if missing:
            raise DataError(
                f"input line {number + 1}: no text under {', '.join(missing)}; correct the line or --json-keys."
            )
        return [record[key] for key in self.keys]


_ENCODER: list[Encoder] = []


def _start_worker(args: argparse.Namespace) -> None:
    _ENCODER.append(Encoder(args))


def _run_task(task: tuple[int, list[str]]) -> Encoded | Exception:
    """Encode in a worker; an error of the user travels back as a value, so that the pool ends in order."""
    try:
        return _ENCODER[-1].encode(task)
    except USER_ERRORS as error:
        return error


def make_tasks(documents: Iterable[str], max_documents: int | None) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first document, documents) in portions of about equal length."""
    portion: list[str] = []
    number = num_characters = 0
    for document in islice(documents, max_documents):
        portion.append(document)
        num_characters += len(document)
        if num_characters >= TASK_CHARACTERS:
            yield number, portion
            number, portion, num_characters = number + len(portion), [], 0
    if portion:
        yield number, portion


def encode_all(args: argparse.Namespace, encoder: Encoder) -> Iterator[Encoded]:
    """Yield the encoded tasks in the order of the input, from this process or from a pool of workers."""
    tasks = make_tasks(read_documents(args.input, args.input_format), args.max_documents)
    if args.workers == 1:
        yield from map(encoder.encode, tasks)
        return
    with multiprocessing.Pool(args.workers, initializer=_start_worker, initargs=(args,)) as pool:
        for result in pool.imap(_run_task, tasks):
            if isinstance(result, Exception):
                raise result
            yield result


def preprocess(args: argparse.Namespace) -> list[str]:
    """Write the files and return their prefixes.

    Raises: DataError for input that cannot be read, lines that do not fit, and a corpus without a token.
    """
    if args.input_format == "auto":
        args.input_format = "text" if args.input.endswith(TEXT_SUFFIXES) else "jsonl"
    keys = args.json_keys if args.input_format == "jsonl" else ["text"]
    encoder = Encoder(args)
    prefixes = [f"{args.output_prefix}_{key}_document" for key in keys]
    try:
        Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"output_prefix={args.output_prefix!r}: the folder cannot be made ({error.strerror}); choose another one."
        ) from error
    builders = [IndexedDatasetBuilder(get_bin_path(prefix), dtype=encoder.dtype) for prefix in prefixes]
    num_documents = num_tokens = 0
    start = time.monotonic()
    with tqdm(unit=" documents", disable=not sys.stderr.isatty()) as progress:
        for task in encode_all(args, encoder):
            for builder, (tokens, lengths) in zip(builders, task, strict=True):
                builder.add_documents(tokens, lengths)
                num_tokens += len(tokens)
            added = len(task[0][1])
            progress.update(added)
            before, num_documents = num_documents, num_documents + added
            if progress.disable and num_documents // args.log_interval > before // args.log_interval:
                rate = num_documents / (time.monotonic() - start)
                print(f"{num_documents} documents, {rate:.0f} per second", file=sys.stderr)
    if num_tokens == 0:
        raise DataError(
            f"input={args.input!r}: {num_documents} documents without a single token; give a corpus with text."
        )
    for builder, prefix in zip(builders, prefixes, strict=True):
        builder.finalize(get_idx_path(prefix))
    print(f"{num_documents} documents, {num_tokens} tokens of {encoder.dtype.name}: {' '.join(prefixes)}")
    return prefixes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; an error of the user is a message and an exit code."""
    try:
        preprocess(parse_arguments(argv))
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
