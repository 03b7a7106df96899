"""Tokens: all shards of a data set as one array of tokens, of which a few are mapped at a time.

shards      | 00000.bin | 00001.bin | 00002.bin |
tokens      0 ..................................... num_tokens - 1
tokens[a:b]             `--- copied, across shards if need be ---'
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from pyops.data import CorpusError

__all__ = ["Part", "Tokens"]

MOST_OPEN = 64  # files that are mapped at a time


@dataclass(frozen=True)
class Part:
    """Tokens of one file."""

    path: Path
    """The file."""
    dtype: np.dtype[np.unsignedinteger]
    """Of a token."""
    num_tokens: int
    """How many."""
    starts: Callable[[], np.ndarray] | None
    """Makes where each document begins, and where the last one ends: int64 [documents + 1]; None
    where that is not known."""
    num_documents: int = 0
    """That the file has; 0 where that is not known."""
    offset: int = 0
    """Bytes of the file before its first token."""


class Tokens:
    """The tokens of several files, one behind the other. `pyops.token_data.open_tokens` makes it.

    Args:
        path: By which they were opened, for messages.
        parts: The files; those without tokens are left out.
        digest: Of the tokens, or of the names and sizes of their files.
        vocab_size: Tokens are below it; 0 where the format does not say.
        tokenizer: The digest of what made the tokens; "" where the format does not say.

    Raises:
        CorpusError: There is no token, or a file has not the size that it should.
    """

    def __init__(
        self,
        path: Path | str,
        parts: Sequence[Part],
        *,
        digest: str,
        vocab_size: int = 0,
        tokenizer: str = "",
    ) -> None:
        self.path, self.digest = Path(path), digest
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        self.parts = [part for part in parts if part.num_tokens]
        if not self.parts:
            raise CorpusError(f"{path} has no tokens; write some with pyops data")
        for part in self.parts:
            wanted = part.offset + part.num_tokens * part.dtype.itemsize
            if (size := part.path.stat().st_size) < wanted:
                raise CorpusError(
                    f"shard {part.path} is truncated: it has {size} bytes, and should have "
                    f"{wanted}; copy it again"
                )
        self._ends = np.cumsum([part.num_tokens for part in self.parts])
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()
        self._starts: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = Lock()

    @property
    def num_tokens(self) -> int:
        """Of all files."""
        return int(self._ends[-1])

    @property
    def num_documents(self) -> int:
        """Of all files; 0 where the format has none."""
        return sum(part.num_documents for part in self.parts)

    @property
    def has_documents(self) -> bool:
        """Whether it is known where documents begin."""
        return all(part.starts is not None for part in self.parts)

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, step = place.indices(self.num_tokens)
        if step != 1:
            raise ValueError(f"tokens are read one after the other, not by steps of {step}")
        return self.read(start, max(0, stop - start))

    def read(self, start: int, count: int) -> np.ndarray:
        """Some tokens.

        Args:
            start: The first one.
            count: How many.

        Returns:
            [count] in the dtype of the file, a view where they lie in one.

        Raises:
            IndexError: There are not so many.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(
                f"tokens {start} to {start + count} of {self.path}, which has {self.num_tokens}"
            )
        found, part = [], int(np.searchsorted(self._ends, start, side="right"))
        while count:
            begin = start - (int(self._ends[part - 1]) if part else 0)
            piece = self._mapped(part)[begin : begin + count]
            found.append(piece)
            start, count, part = start + piece.size, count - piece.size, part + 1
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, dtype=self.parts[0].dtype)

    def _mapped(self, part: int) -> np.ndarray:
        with self._lock:  # a thread reads ahead
            if part not in self._maps:
                own = self.parts[part]
                self._maps[part] = np.memmap(
                    own.path, dtype=own.dtype, mode="r", offset=own.offset, shape=(own.num_tokens,)
                )
                if len(self._maps) > MOST_OPEN:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(part)
            return self._maps[part]

    def starts_of(self, part: int) -> np.ndarray:
        """Where the documents of one file begin, counted from the first token of all files, and
        where the last one ends.

        Args:
            part: The number of the file in `parts`.

        Returns:
            int64 [documents + 1].

        Raises:
            CorpusError: The format has no documents, or the starts are not those of these tokens.
        """
        own = self.parts[part]
        if own.starts is None:
            raise CorpusError(
                f"{own.path} does not say where documents begin; set data.packing to "
                '"none", or write the tokens anew with pyops data'
            )
        found = np.asarray(own.starts(), dtype=np.int64)
        whole = found.size and found[0] == 0 and found[-1] == own.num_tokens
        if not whole or (np.diff(found) < 0).any():
            raise CorpusError(
                f"the documents of {own.path} are damaged: they do not lead from token 0 to "
                f"{own.num_tokens}; copy it again"
            )
        result: np.ndarray = found + (int(self._ends[part - 1]) if part else 0)
        return result

    def place_of(self, token: int) -> str:
        """In which file, and which document of it, a token lies, in words."""
        part = int(np.searchsorted(self._ends, token, side="right"))
        own = token - (int(self._ends[part - 1]) if part else 0)
        text = f"{self.parts[part].path}, token {own}"
        if self.parts[part].starts is None:
            return text
        document = int(np.searchsorted(self.starts_of(part), token, side="right")) - 1
        return f"{text}, document {document}"
