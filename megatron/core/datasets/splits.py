"""Read `--split` and the words of a blend, and do the arithmetic of shares."""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from megatron.core.errors import DataError

Blend = tuple[list[str], list[float] | None]
Bookends = list[tuple[float, float] | None]

MAX_BLEND_DATASETS = 32767


class Split(enum.Enum):
    """The three parts of the data; the value is their place in every list of three."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide weights by their sum, in float64."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def parse_split(split: str) -> list[float]:
    """Return the three shares of a `--split` text: every number in it counts, missing ones are zero.

    Raises: DataError if there are more than three numbers or their sum is zero.
    """
    numbers = [float(word) for word in re.findall(r"[.0-9]+", split)] if _is_readable(split) else []
    if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0:
        raise DataError(
            f"split={split!r}: one to three proportions with a sum above zero are needed; write e.g. 969,30,1."
        )
    return normalize(numbers + [0.0] * (3 - len(numbers)))


def _is_readable(split: str) -> bool:
    """Say whether every run of digits and dots is a number, none is negative and no other word stands between."""
    if re.search(r"[a-zA-Z]", split):
        return False
    return all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in re.findall(r"[.0-9]+", split)) and "-" not in split


def split_bookends(shares: Sequence[float]) -> Bookends:
    """Return [low, high) of each split as fractions of the data; None for a split without width."""
    borders = list(itertools.accumulate(shares, initial=0))
    return [(low, high) if low < high else None for low, high in itertools.pairwise(borders)]


def split_indices(bookends: tuple[float, float], num_sequences: int) -> np.ndarray:
    """Return the sequence numbers int32[n] that lie between two fractions, rounded half to even."""
    begin, end = (round(fraction * float(num_sequences)) for fraction in bookends)
    return np.arange(begin, end, dtype=np.int32)


def get_blend_from_list(words: Sequence[str] | None) -> Blend | None:
    """Read the words of `--data-path`: (prefixes, weights), with weights None if none are given.

    An even number of words is read as weight-prefix pairs if each first word is a number; all else is prefixes.
    """
    if not words:
        return None
    if len(words) % 2 == 0:
        weights = [_number(word) for word in words[::2]]
        if None not in weights:
            return [prefix.strip() for prefix in words[1::2]], [weight for weight in weights if weight is not None]
    return [prefix.strip() for prefix in words], None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def check_blend(blend: Blend, option: str = "data_path") -> None:
    """Refuse a blend whose weights make no sense.

    Raises: DataError that names the prefix with its weight.
    """
    prefixes, weights = blend
    if not prefixes or any(not prefix for prefix in prefixes):
        raise DataError(
            f"{option}={prefixes!r}: at least one prefix and none empty; name the files without .bin or .idx."
        )
    if len(prefixes) >= MAX_BLEND_DATASETS:
        raise DataError(f"{option}: {len(prefixes)} datasets, below {MAX_BLEND_DATASETS} are possible; merge some.")
    if weights is None:
        return
    if len(weights) != len(prefixes):
        raise DataError(f"{option}: {len(weights)} weights for {len(prefixes)} prefixes; give one weight for each.")
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(
                f"{option}: weight {weight} of {prefix!r} must be a finite number above zero; drop the "
                "dataset or change its weight."
            )


def blend_sizes(shares: Sequence[float], size: int) -> list[int]:
    """Return how many of `size` samples each dataset of a blend contributes, rounded up."""
    return [math.ceil(size * share) for share in shares]


def with_surplus(size: int, surplus: float) -> int:
    """Return how many samples a dataset is built for, so that the rounding of the greedy order never runs out."""
    return math.ceil(size * (1 + surplus))
