"""GPT-2's byte-level BPE, from a vocabulary (`--vocab-file`, JSON) and its merges (`--merge-file`).

A text is split into words by a pattern, each word is written in 256 printable characters that stand for its bytes, and
inside a word the neighbouring pair that comes first in the list of merges is joined until no pair of the list is left.
"""

from __future__ import annotations

import json
from itertools import pairwise

import regex

from megatron.core.errors import DataError
from megatron.core.tokenizers.base import MegatronTokenizer, check_readable

WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END_OF_TEXT = "<|endoftext|>"
MAX_CACHED_WORDS = 1 << 18


def printable_bytes() -> dict[int, str]:
    """Return the character that stands for each byte: itself if it prints, else one from 256 on, in order."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printing}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return table


class GPT2BPETokenizer(MegatronTokenizer):
    """Byte-level BPE; `<|endoftext|>` ends a document."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        super().__init__(vocab_file, merge_file)
        self._ids = _read_vocabulary(vocab_file)
        self._ranks = _read_merges(merge_file)
        self._tokens = {token: text for text, token in self._ids.items()}
        self._vocab_size = max(self._tokens) + 1
        self._characters = printable_bytes()
        self._bytes = {character: byte for byte, character in self._characters.items()}
        self._split = regex.compile(WORD_PATTERN).findall
        self._cache: dict[str, list[int]] = {}
        unknown = [pair for pair in self._ranks if "".join(pair) not in self._ids]
        if unknown or any(character not in self._ids for character in self._bytes):
            what = f"the merge {unknown[0]}" if unknown else "some of the 256 byte characters"
            raise DataError(
                f"merge_file={merge_file!r} with vocab_file={vocab_file!r}: {what} has no id; take both from one model."
            )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for word in self._split(text):
            known = self._cache.get(word)
            ids += self._encode_word(word) if known is None else known
        return ids

    def _encode_word(self, word: str) -> list[int]:
        """Return the ids of a word and remember them."""
        parts = [self._characters[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            parts = _join(parts, best)
        ids = [self._ids[part] for part in parts]
        if len(self._cache) < MAX_CACHED_WORDS:
            self._cache[word] = ids
        return ids

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids."""
        text = "".join(self._tokens[token] for token in ids)
        raw = b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode("utf-8") for c in text)
        return raw.decode("utf-8", errors="replace")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._vocab_size

    def _special(self, name: str) -> int | None:
        return self._ids.get(END_OF_TEXT) if name in ("eod", "eos") else None


def _join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Join each occurrence of a pair, from left to right."""
    joined: list[str] = []
    place = 0
    while place < len(parts):
        if tuple(parts[place : place + 2]) == pair:
            joined.append(pair[0] + pair[1])
            place += 2
        else:
            joined.append(parts[place])
            place += 1
    return joined


def _read_vocabulary(path: str) -> dict[str, int]:
    """Read {token: id}."""
    check_readable("vocab_file", path)
    try:
        with open(path, encoding="utf-8") as stream:
            ids = json.load(stream)
    except ValueError as error:
        raise DataError(f"vocab_file={path!r}: this is no JSON ({error}); name GPT-2's vocab.json.") from error
    if not isinstance(ids, dict) or not ids or not all(isinstance(token, int) for token in ids.values()):
        raise DataError(f"vocab_file={path!r}: an object of tokens with their ids is needed; name GPT-2's vocab.json.")
    return ids


def _read_merges(path: str) -> dict[tuple[str, str], int]:
    """Read one merge a line, best first; a first line that begins with `#version` is skipped."""
    check_readable("merge_file", path)
    try:
        with open(path, encoding="utf-8") as stream:
            lines = [line for line in stream.read().split("\n") if line and not line.startswith("#version")]
    except ValueError as error:
        raise DataError(f"merge_file={path!r}: this is no text ({error}); name GPT-2's merges.txt.") from error
    ranks: dict[tuple[str, str], int] = {}
    for rank, line in enumerate(lines):
        parts = line.split()
        if len(parts) != 2:
            raise DataError(f"merge_file={path!r}: {line[:40]!r} is no pair of tokens; name GPT-2's merges.txt.")
        ranks[parts[0], parts[1]] = rank
    return ranks
