#!/usr/bin/env python3
"""Measure the data path against what training needs of it: `python tools/benchmark/data.py [--output FILE]`.

    index       seconds to build, store and load the sample order of 1 M documents / 1 G tokens, at most 5 s
    preprocess  text per second of processor time, over that of the bare tokenizer, at least 0.8
    loader      samples per second, over what a rank of the quickstart takes, at least 20

Figures are medians of interleaved runs; the raw times are in the JSON. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.datasets import index_kernels
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.splits import Split
from megatron.core.optional_deps import is_available, require
from megatron.core.tokenizers.byte import ByteTokenizer
from megatron.training.data_loaders import build_pretraining_data_loader
from tools import preprocess_data
from tools.benchmark.result import ROOT, write_result

CORPUS = ROOT / "examples" / "data" / "kjv_genesis_ruth.txt"
NUM_DOCUMENTS, NUM_TOKENS = 1_000_000, 1_000_000_000
MAX_INDEX_S, MIN_PREPROCESS_RATIO, MIN_LOADER_RATIO = 5.0, 0.8, 20.0
QUICKSTART = {"seq_length": 128, "micro_batch_size": 16}
CORPUS_COPIES = {"ByteTokenizer": 64}
DEFAULT_CORPUS_COPIES = 16


def seconds(action: Callable[[], Any]) -> float:
    """Return the time that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cpu_seconds(action: Callable[[], Any]) -> float:
    """Return the processor time that an action takes in this process and in those it starts and ends."""

    def used() -> float:
        return sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    start = used()
    action()
    return used() - start


class DocumentLengths:
    """Stands for a token file of which only the lengths are read."""

    def __init__(self) -> None:
        lengths = np.random.default_rng(0).geometric(NUM_DOCUMENTS / NUM_TOKENS, NUM_DOCUMENTS)
        lengths[-1] += max(0, NUM_TOKENS - int(lengths.sum()))
        self.sequence_lengths = lengths.astype(np.int32)


def measure_index(repeats: int) -> dict[str, Any]:
    """Time the construction of a dataset, index files included, with each builder that is there."""
    documents = DocumentLengths()
    indices = np.arange(NUM_DOCUMENTS, dtype=np.int32)
    builders = {"numpy": None, **({"c++": require("helpers_cpp")} if is_available("helpers_cpp") else {})}
    raw: dict[str, list[float]] = {name: [] for name in builders}
    for _ in range(repeats):
        for name, compiled in builders.items():
            index_kernels._compiled = lambda compiled=compiled: compiled
            with tempfile.TemporaryDirectory() as cache:
                config = GPTDatasetConfig(
                    1234, 4096, ([cache], None), split="1,0,0", tokenizer=ByteTokenizer(), path_to_cache=cache
                )
                raw[name].append(
                    seconds(lambda config=config: GPTDataset(documents, "bench", indices, None, Split.train, config))
                )
    medians = {name: statistics.median(times) for name, times in raw.items()}
    return {
        "documents": NUM_DOCUMENTS,
        "tokens": int(documents.sequence_lengths.sum(dtype=np.int64)),
        "seconds": medians,
        "raw_s": raw,
        "bound_s": MAX_INDEX_S,
        "passed": max(medians.values()) <= MAX_INDEX_S,
    }


def tokenizer_flags(folder: Path) -> dict[str, list[str]]:
    """Return flags of the tokenizers to measure; models are trained on the corpus where their library is there."""
    flags = {"ByteTokenizer": ["--tokenizer-type", "ByteTokenizer"]}
    if is_available("tokenizers"):
        model = require("tokenizers").ByteLevelBPETokenizer()
        model.train([str(CORPUS)], vocab_size=4000, special_tokens=["<|endoftext|>"], show_progress=False)
        model.save_model(str(folder))
        files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
        flags["GPT2BPETokenizer"] = ["--tokenizer-type", "GPT2BPETokenizer", *files]
    if is_available("sentencepiece"):
        trainer = require("sentencepiece").SentencePieceTrainer
        trainer.Train(
            input=str(CORPUS), model_prefix=str(folder / "sp"), vocab_size=4000, minloglevel=2, max_sentence_length=8000
        )
        model_flags = ["--tokenizer-model", str(folder / "sp.model")]
        flags["GPTSentencePieceTokenizer"] = ["--tokenizer-type", "GPTSentencePieceTokenizer", *model_flags]
    return flags


def measure_preprocess(repeats: int) -> dict[str, Any]:
    """Compare preprocessing of JSON lines, files included, with a loop over the tokenizer in one process.

    Processor time, so that it does not matter what else the machine does; with workers it is the sum over all
    processes, each with a tokenizer and a word cache of its own to fill, which counts less the larger the corpus is.
    """
    corpus = list(preprocess_data.read_documents(str(CORPUS), "text"))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = folder / "in.jsonl"
        for kind, flags in tokenizer_flags(folder).items():
            documents = corpus * CORPUS_COPIES.get(kind, DEFAULT_CORPUS_COPIES)
            num_bytes = sum(len(document.encode()) for document in documents)
            lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
            words = ["--input", str(lines), "--output-prefix", str(folder / "out"), "--append-eod", *flags]
            raw: dict[str, list[float]] = {"bare": [], "1 worker": [], "2 workers": []}
            for _ in range(repeats):
                encoder = preprocess_data.Encoder(preprocess_data.parse_arguments([*words, "--workers", "1"]))
                raw["bare"].append(
                    cpu_seconds(lambda e=encoder, d=documents: [e.tokenizer.tokenize(text) for text in d])
                )
                for workers in (1, 2):
                    args = preprocess_data.parse_arguments([*words, "--workers", str(workers)])
                    label = f"{workers} worker" + "s" * (workers > 1)
                    raw[label].append(cpu_seconds(lambda args=args: preprocess_data.preprocess(args)))
            medians = {label: statistics.median(times) for label, times in raw.items()}
            ratio = {label: medians["bare"] / medians[label] for label in raw if label != "bare"}
            results[kind] = {
                "bytes": num_bytes,
                "bare_mb_per_cpu_s": num_bytes / medians["bare"] / 1e6,
                "ratio": ratio,
                "raw_cpu_s": raw,
                "passed": min(ratio.values()) >= MIN_PREPROCESS_RATIO,
            }
    passed = all(row["passed"] for row in results.values())
    return {"tokenizers": results, "bound": MIN_PREPROCESS_RATIO, "passed": passed}


def step_ms_of_log(path: str) -> float:
    """Return the median time per iteration that a training log prints."""
    times = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", Path(path).read_text(encoding="utf-8"))
    if not times:
        raise SystemExit(f"train_log={path!r}: it has no 'elapsed time per iteration'; name the log of a quickstart.")
    return statistics.median(map(float, times))


def measure_loader(repeats: int, step_ms: float, num_batches: int = 200) -> dict[str, Any]:
    """Time batches from files in the quickstart's shape, in the loading process itself and with one worker."""
    per_step = QUICKSTART["micro_batch_size"]
    demand = per_step / step_ms * 1e3
    raw: dict[str, list[float]] = {"0 workers": [], "1 worker": []}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--input", str(CORPUS), "--output-prefix", f"{folder}/c", "--tokenizer-type", "ByteTokenizer"]
        prefix = preprocess_data.preprocess(preprocess_data.parse_arguments([*words, "--workers", "1"]))[0]
        low_level = IndexedDataset(prefix)
        config = GPTDatasetConfig(
            1234, QUICKSTART["seq_length"], ([prefix], None), tokenizer=ByteTokenizer(), create_attention_mask=False
        )
        indices = np.arange(len(low_level), dtype=np.int32)
        dataset = GPTDataset(low_level, prefix, indices, (num_batches + 1) * per_step, Split.train, config)
        for _ in range(repeats):
            for label in raw:
                args = argparse.Namespace(
                    dataloader_type="single",
                    num_workers=int(label[0]),
                    device="cpu",
                    micro_batch_size=per_step,
                    seed=1234,
                )
                batches = iter(build_pretraining_data_loader(dataset, 0, args, 0, 1) or ())
                next(batches)
                raw[label].append(seconds(lambda batches=batches: [next(batches) for _ in range(num_batches)]))
    rates = {label: num_batches * per_step / statistics.median(times) for label, times in raw.items()}
    ratio = {label: rate / demand for label, rate in rates.items()}
    return {
        "shape": QUICKSTART,
        "quickstart_step_ms": step_ms,
        "demand_samples_per_s": demand,
        "samples_per_s": rates,
        "ratio": ratio,
        "raw_s": raw,
        "bound": MIN_LOADER_RATIO,
        "passed": min(ratio.values()) >= MIN_LOADER_RATIO,
    }


def report(results: dict[str, Any]) -> str:
    """Return the table that is printed."""
    lines = [f"{'what':<52}{'figure':>12}{'bound':>10}"]
    for name, value in results["index"]["seconds"].items():
        lines.append(f"{'index, 1 M documents / 1 G tokens, ' + name:<52}{value:>10.2f} s{'<= 5 s':>10}")
    for kind, row in results["preprocess"]["tokenizers"].items():
        for label, value in row["ratio"].items():
            lines.append(f"{f'preprocess, {kind}, {label}':<52}{value:>10.2f} x{'>= 0.8 x':>10}")
    for label, value in results["loader"]["ratio"].items():
        lines.append(f"{f'loader, {label}':<52}{value:>10.0f} x{'>= 20 x':>10}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "evidence" / "benchmarks" / "data.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train-log", help="log of a quickstart; its median step time is the demand")
    parser.add_argument("--step-ms", type=float, default=200.0, help="the quickstart's step without a log")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    step_ms = step_ms_of_log(args.train_log) if args.train_log else args.step_ms
    results = {
        "index": measure_index(args.repeats),
        "preprocess": measure_preprocess(args.repeats),
        "loader": measure_loader(args.repeats, step_ms),
    }
    print(report(results))
    write_result(args.output, results)
    return 0 if all(part["passed"] for part in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
