"""Models of the sentencepiece library (`--tokenizer-model FILE`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.errors import DataError
from megatron.core.optional_deps import require
from megatron.core.tokenizers.base import MegatronTokenizer, check_readable

ADDED_PIECES = {
    "cls": "<CLS>",
    "sep": "<SEP>",
    "eod": "<EOD>",
    "mask": "<MASK>",
    "pad": "<PAD>",
    "bos": "<BOS>",
    "eos": "<EOS>",
}


class GPTSentencePieceTokenizer(MegatronTokenizer):
    """A model as it is; its end of sequence ends a document."""

    def __init__(self, tokenizer_model: str) -> None:
        super().__init__(tokenizer_model)
        library = require("sentencepiece", f"tokenizer_type={type(self).__name__!r}")
        check_readable("tokenizer_model", tokenizer_model)
        self._model: Any = library.SentencePieceProcessor()
        try:
            self._model.Load(tokenizer_model)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"tokenizer_model={tokenizer_model!r}: this is no sentencepiece model ({error}); name a .model file."
            ) from error

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._model.EncodeAsIds(text)

    def _encode(self, text: str) -> Sequence[int] | np.ndarray:
        # Older releases of the library (0.2.1) have no arrays.
        return getattr(self._model, "EncodeAsNumpy", self._model.EncodeAsIds)(text)

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self._model.DecodeIds(ids)

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return self._model.GetPieceSize()

    def _special(self, name: str) -> int | None:
        """Ids that the model itself declares; it answers -1 for those it lacks."""
        ids = {
            "eod": self._model.eos_id,
            "eos": self._model.eos_id,
            "bos": self._model.bos_id,
            "pad": self._model.pad_id,
            "unk": self._model.unk_id,
        }
        value = ids[name]() if name in ids else -1
        return value if value >= 0 else None


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A Llama model: each text begins with the begin-of-sequence id."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with BOS in front."""
        return [self.bos, *super().tokenize(text)]

    def _encode(self, text: str) -> Sequence[int]:
        return self.tokenize(text)


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """A model with ids of its own for CLS, SEP, EOD, MASK, PAD, BOS and EOS.

    Those that the model has by name, or declares as pad, bos or eos, keep their ids; the others follow its vocabulary.
    """

    def __init__(self, tokenizer_model: str) -> None:
        super().__init__(tokenizer_model)
        self._next_id = super().vocab_size
        self._added: dict[str, int] = {}
        for name, piece in ADDED_PIECES.items():
            declared = super()._special(name) if name in ("pad", "bos", "eos") else None
            self._added[name] = self._id_of(piece) if declared is None else declared

    def _id_of(self, piece: str) -> int:
        """Return the id of a piece, or the next free one."""
        token = self._model.PieceToId(piece)
        if self._model.IdToPiece(token) == piece:
            return token
        self._next_id += 1
        return self._next_id - 1

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of ids; added ids are written by name."""
        names = {self._added[name]: piece for name, piece in ADDED_PIECES.items()}
        size = super().vocab_size
        text, plain = "", []
        for token in ids:
            if token < size:
                plain.append(token)
                continue
            text += self._model.DecodeIds(plain) + names[token]
            plain = []
        return text + self._model.DecodeIds(plain)

    @property
    def vocab_size(self) -> int:
        """Pieces of the model and the added ids."""
        return self._next_id

    def _special(self, name: str) -> int | None:
        return self._added[name] if name in self._added else super()._special(name)
