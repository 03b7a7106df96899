"""Bytes to tokens and back: every byte a token, or byte pairs merged as often as the vocabulary
allows (BPE)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pyops.data.corpus import CorpusError

__all__ = ["ByteTokenizer", "PairTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """What a corpus needs to know of its tokens."""

    vocab_size: int

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, an integer array [n]."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, tokens: np.ndarray) -> int:
        """How many bytes of text the tokens stand for."""
        ...


class ByteTokenizer:
    """Each byte is the token of its value."""

    vocab_size = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, an integer array [n]."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")

    def token_bytes(self, tokens: np.ndarray) -> int:
        """How many bytes of text the tokens stand for."""
        return int(tokens.size)


class PairTokenizer:
    """Byte-pair encoding over bytes (Sennrich et al., 2016), trained and run by the package
    `tokenizers`.

    Text that is no UTF-8 is read with U+FFFD in place of the bytes that are wrong.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.vocab_size = inner.get_vocab_size()
        self._lengths = np.zeros(self.vocab_size, dtype=np.int64)
        # In the byte-level alphabet one character stands for one byte.
        for piece, token in inner.get_vocab().items():
            self._lengths[token] = len(piece)

    @classmethod
    def train(cls, texts: Iterable[bytes], *, vocab_size: int) -> PairTokenizer:
        """Learn merges until there are `vocab_size` tokens or nothing is left to merge."""
        if vocab_size < 256:
            raise CorpusError(
                f"a BPE starts from the 256 bytes, but model.vocab_size is {vocab_size}; "
                "set it to 256 or more"
            )
        tokenizers = _import_tokenizers()
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(
            (text.decode("utf-8", errors="replace") for text in texts), trainer
        )
        return cls(inner)

    @classmethod
    def load(cls, path: Path) -> PairTokenizer:
        """The tokenizer of a file that `save` wrote."""
        return cls(_import_tokenizers().Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write the merges as a `tokenizer.json` of the tokenizers library."""
        path.write_text(self._inner.to_str())

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, an integer array [n]."""
        return np.asarray(
            self._inner.encode(text.decode("utf-8", errors="replace")).ids, dtype=np.int64
        )

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return str(self._inner.decode([t for t in tokens if t < self.vocab_size]))

    def token_bytes(self, tokens: np.ndarray) -> int:
        """How many bytes of text the tokens stand for."""
        return int(self._lengths[tokens].sum())


def _import_tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as error:
        message = (
            "data.tokenizer is 'bpe', which needs the package tokenizers: pip install "
            "tokenizers, or set 'bytes'"
        )
        raise CorpusError(message) from error
    return tokenizers
