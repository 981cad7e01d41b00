#!/usr/bin/env python3
"""Print size and entropies of a text: what a model that sees no context, or one byte of it, cannot beat.

`entropy` is that of single bytes; `bigram` is the entropy of a byte given the one before it, the loss of the best model
that looks one byte back. Both in nats per byte, the unit of the training loss of ByteTokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def entropy(counts: np.ndarray) -> float:
    """Return the entropy in nats of a distribution given as counts [n]."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def corpus_stats(text: bytes) -> dict[str, float]:
    """Return bytes, documents (blocks between blank lines), byte entropy and bigram entropy of a text."""
    values = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    pairs = np.bincount(values[:-1] * 256 + values[1:], minlength=65536)
    before = pairs.reshape(256, 256).sum(axis=1)
    blocks = [block for block in text.split(b"\n\n") if block.strip()]
    return {
        "bytes": len(text),
        "documents": len(blocks),
        "entropy": entropy(np.bincount(values, minlength=256)),
        "bigram": entropy(pairs) - entropy(before),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of a file, as words or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a text file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    text = args.path.read_bytes() if args.path.is_file() else b""
    if len(text) < 2:
        print(f"DataError: path={str(args.path)!r}: no such file, or nothing in it; name a text file.", file=sys.stderr)
        return 1
    stats = corpus_stats(text)
    if args.json:
        print(json.dumps(stats))
    else:
        print(
            f"{args.path}: {stats['bytes']:.0f} bytes, {stats['documents']:.0f} documents, "
            f"entropy {stats['entropy']:.3f} nats per byte, bigram {stats['bigram']:.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
