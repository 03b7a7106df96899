"""ShardWriter: documents of tokens, one behind the other, into shards of bounded size.

    add(document) ... -> 00000.bin, 00000.starts | 00001.bin, ... | close() -> index.json

A shard is under a temporary name until it is whole and on the disk. progress.json names the whole
ones, so a writer of the same settings goes on behind them; index.json is written last, so a folder
that has one is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from pyops.data import CorpusError
from pyops.token_data.shard_index import (
    INDEX,
    TOKENIZER,
    Shard,
    ShardIndex,
    token_dtype,
    tokenizer_digest,
)

__all__ = ["ShardWriter", "TokenKind"]

PROGRESS = "progress.json"
SHARD_TOKENS = 1 << 28


@dataclass(frozen=True)
class TokenKind:
    """What the tokens of a folder are."""

    vocab_size: int
    """Tokens are below it."""
    tokenizer: str = ""
    """The text of tokenizer.json; "": not known."""
    end_of_document: int | None = None
    """Written behind each document; None: nothing is."""


class ShardWriter:
    """Writes a folder of token shards; a context manager that closes it where nothing was raised.

    Args:
        folder: A new one, or one that a writer of the same `kind` and `settings` left unfinished.
        kind: What the tokens are.
        shard_tokens: A shard is closed with the document that fills it up to this.
        settings: What else must be the same for a writer that goes on, as JSON takes it.

    Attributes:
        folder: As given.
        consumed: The value that `add` was given with the last document of the last whole shard: 0
            for a new folder.

    Raises:
        CorpusError: The folder is complete already, of other settings, or can't be written.
    """

    def __init__(
        self,
        folder: Path | str,
        kind: TokenKind,
        *,
        shard_tokens: int = SHARD_TOKENS,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens is {shard_tokens}; a shard has 1 token or more")
        if kind.vocab_size < 1 or kind.vocab_size > 1 << 32:
            raise ValueError(f"vocab_size is {kind.vocab_size}; give 1 to 2^32")
        self.folder, self._kind, self._most = Path(folder), kind, shard_tokens
        self._dtype = np.dtype(token_dtype(kind.vocab_size)).newbyteorder("<")
        self._tokenizer = tokenizer_digest(kind.tokenizer) if kind.tokenizer else ""
        self._settings = {
            "vocab_size": kind.vocab_size,
            "tokenizer": self._tokenizer,
            "end_of_document": kind.end_of_document,
            "shard_tokens": shard_tokens,
            **(settings or {}),
        }
        self._shards: list[Shard] = []
        self.consumed = 0
        self._file: BinaryIO | None = None
        self._closed: ShardIndex | None = None
        try:
            self._begin()
        except OSError as error:
            raise self._refused(error) from error

    def _begin(self) -> None:
        if (self.folder / INDEX).exists():
            raise CorpusError(
                f"{self.folder} has a complete {INDEX} already; name another folder, or delete "
                "this one"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = self.folder / PROGRESS
        if progress.exists():
            self._go_on(progress)
        elif any(self.folder.iterdir()):
            raise CorpusError(
                f"{self.folder} is not empty, and was not begun by pyops data; name a new folder"
            )
        for left in self.folder.glob("*.tmp"):
            left.unlink()
        self._save_progress()
        if self._kind.tokenizer:
            (self.folder / TOKENIZER).write_text(self._kind.tokenizer, encoding="utf-8")

    def _go_on(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            settings, consumed = found["settings"], int(found["consumed"])
            shards = [Shard(**shard) for shard in found["shards"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{path} is damaged ({error}); delete {self.folder} and begin anew"
            ) from None
        wanted = json.loads(json.dumps(self._settings))
        if settings != wanted:
            keys = sorted(k for k in {*settings, *wanted} if settings.get(k) != wanted.get(k))
            raise CorpusError(
                f"{self.folder} was begun with other {', '.join(keys)}; give them as they were, "
                "or name a new folder"
            )
        self._shards, self.consumed = shards, consumed
        self._index().check_sizes(self.folder)

    def add(self, document: np.ndarray, *, consumed: int = 0) -> None:
        """Write one document.

        Args:
            document: Whole numbers [n] from 0 to vocab_size - 1, without the end of the document.
            consumed: What to remember as consumed with this document, for a writer that goes on.

        Raises:
            CorpusError: A token is out of range, or the disk is full; whole shards stay.
        """
        self.extend(document, np.array([document.size]), consumed=consumed)

    def extend(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        *,
        consumed: int = 0,
        goes_on: bool = False,
    ) -> None:
        """Write several documents.

        Args:
            tokens: Of all of them, one behind the other: [n].
            lengths: Of each, whole numbers of the sum n.
            consumed: As of `add`, for all of them.
            goes_on: Whether the last document goes on with the next call.

        Raises:
            ValueError: The lengths are not those of the tokens.
            CorpusError: As of `add`.
        """
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths sum up to {lengths.sum()}, and there are {tokens.size}")
        size = self._kind.vocab_size
        if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < size):
            bad = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
            raise CorpusError(
                f"token {tokens[bad]} is not in a vocabulary of {size}; take the tokenizer "
                "that made the tokens"
            )
        try:
            self._extend(tokens, lengths, goes_on=goes_on)
            if not goes_on and self._written >= self._most:
                self._close_shard(consumed)
        except OSError as error:
            raise self._refused(error) from error

    def _extend(self, tokens: np.ndarray, lengths: np.ndarray, *, goes_on: bool) -> None:
        ends, end = np.cumsum(lengths), self._kind.end_of_document
        if goes_on:
            ends = ends[:-1]
        if end is not None:
            tokens = np.insert(tokens, ends, end)
            ends = ends + np.arange(1, ends.size + 1)
        if self._file is None:
            self._name = f"{len(self._shards):05}"
            self._file = open(self.folder / f"{self._name}.bin.tmp", "wb")  # noqa: SIM115
            self._digest = hashlib.blake2b(digest_size=16)
            self._starts, self._written = [0], 0
        data = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._starts.extend((self._written + ends).tolist())
        self._written += tokens.size

    def _close_shard(self, consumed: int) -> None:
        file, self._file = self._file, None
        assert file is not None
        with file:
            file.flush()
            os.fsync(file.fileno())
        starts = np.array(self._starts, dtype="<i8").tobytes()
        self._digest.update(starts)
        with open(self.folder / f"{self._name}.starts.tmp", "wb") as other:
            other.write(starts)
            other.flush()
            os.fsync(other.fileno())
        for end in ("bin", "starts"):
            os.replace(self.folder / f"{self._name}.{end}.tmp", self.folder / f"{self._name}.{end}")
        self._shards.append(
            Shard(self._name, self._written, len(self._starts) - 1, self._digest.hexdigest())
        )
        self.consumed = consumed
        self._save_progress()

    def _save_progress(self) -> None:
        fields = {
            "settings": self._settings,
            "consumed": self.consumed,
            "shards": [asdict(shard) for shard in self._shards],
        }
        aside = self.folder / f"{PROGRESS}.tmp"
        aside.write_text(json.dumps(fields, indent=1), encoding="utf-8")
        os.replace(aside, self.folder / PROGRESS)

    def _index(self) -> ShardIndex:
        return ShardIndex(
            dtype=token_dtype(self._kind.vocab_size),
            vocab_size=self._kind.vocab_size,
            shards=tuple(self._shards),
            tokenizer=self._tokenizer,
            end_of_document=self._kind.end_of_document,
        )

    def close(self) -> ShardIndex:
        """Finish the last shard and write the index; again, this changes nothing.

        Returns:
            The index.

        Raises:
            CorpusError: There was no token, or the disk is full.
        """
        if self._closed is not None:
            return self._closed
        try:
            if self._file is not None:
                self._close_shard(self.consumed)
            index = self._index()
            if not index.num_tokens:
                raise CorpusError(
                    f"nothing was written to {self.folder}: there was no text; name other sources"
                )
            index.save(self.folder)
            (self.folder / PROGRESS).unlink()
        except OSError as error:
            raise self._refused(error) from error
        self._closed = index
        return index

    def abandon(self) -> None:
        """Leave the shard that is not whole; the others stay for a writer that goes on."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what was buffered is lost with the rest
                file.close()
            (self.folder / f"{self._name}.bin.tmp").unlink(missing_ok=True)

    def _refused(self, error: OSError) -> CorpusError:
        self.abandon()
        return CorpusError(
            f"{self.folder} can't be written: {error.strerror or error}; make room there and "
            f"repeat the command, which goes on behind the {len(self._shards)} shards that are "
            "whole, or name another folder"
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()
