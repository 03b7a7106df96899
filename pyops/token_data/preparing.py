"""prepare_tokens: sources become a folder of token shards, by several processes.

    chunks_of(sources) --1-2-3-4--> processes: decode, tokenize --1-2-3-4--> ShardWriter
                         at most a few chunks for each process are under way

The results are written in the order of the chunks, so the folder has the same bytes for any number
of processes. What was stopped goes on behind the last whole shard.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pyops.data import CorpusError
from pyops.data.folder_text import FolderTokenizer
from pyops.token_data.shard_index import ShardIndex, tokenizer_digest
from pyops.token_data.shard_writing import SHARD_TOKENS, ShardWriter, TokenKind
from pyops.token_data.sources import Chunk, chunks_of, find_sources

__all__ = ["PrepareOptions", "Prepared", "prepare_tokens"]

BAD_UNICODE = ("refuse", "replace", "skip")
# (a text, what comes behind it): whether cutting there changes the tokens
PROBES = (("word\n", "Other"), ("a b\n\n", "x1"), ("}\n", "def f():\n"))


@dataclass(frozen=True)
class PrepareOptions:
    """How sources become tokens."""

    tokenizer: str
    """A tokenizer.json, or a folder that has one."""
    key: str = "text"
    """Of the text in a line of JSON; the name of the column in Parquet and in datasets."""
    end: str = ""
    """The token behind each document; "": the one that ends a text in tokenizer_config.json of a
    folder, or none; "none": none."""
    bad_unicode: str = "refuse"
    """Documents that are not UTF-8, or have half a surrogate pair: "refuse" them all, "replace"
    what is wrong by U+FFFD, or "skip" the documents."""
    workers: int = 0
    """Processes that tokenize; 0: as many as there are processors for this process."""
    shard_tokens: int = SHARD_TOKENS
    """A shard is closed when it has as many."""

    def __post_init__(self) -> None:
        if self.bad_unicode not in BAD_UNICODE:
            raise CorpusError(
                f"bad_unicode is {self.bad_unicode!r}; choose one of {', '.join(BAD_UNICODE)}"
            )
        if self.workers < 0:
            raise CorpusError(f"workers is {self.workers}; give 1 or more, or 0 for all processors")
        if self.shard_tokens < 1:
            raise CorpusError(f"shard_tokens is {self.shard_tokens}; a shard has 1 token or more")


@dataclass
class Counts:
    """Documents that are not as they were."""

    num_bytes: int = 0
    """Of UTF-8 that were tokenized."""
    num_empty: int = 0
    """Documents without a token, which are left out."""
    num_bad: int = 0
    """Documents that were not UTF-8: replaced or skipped."""


@dataclass(frozen=True)
class Prepared:
    """What `prepare_tokens` did."""

    index: ShardIndex
    """Of the folder."""
    counts: Counts
    """Of this call alone, not of an earlier one that was stopped."""
    seconds: float
    """It took."""


@dataclass
class Encoded:
    """A chunk as tokens."""

    tokens: np.ndarray
    """uint32 [n]."""
    lengths: np.ndarray
    """int64 [documents]."""
    goes_on: bool
    """Whether the last document goes on in the next chunk."""
    counts: Counts = field(default_factory=Counts)
    """Of the chunk."""


def prepare_tokens(sources: Iterable[str], folder: Path | str, options: PrepareOptions) -> Prepared:
    """Tokenize sources into a folder of shards, or go on where an earlier call was stopped.

    Args:
        sources: Files, folders, and datasets as hf:NAME@CONFIG:SPLIT.
        folder: A new one, or the one that the earlier call left.
        options: The tokenizer, and how texts are read.

    Returns:
        The index, and what was left out.

    Raises:
        CorpusError: A source or the tokenizer can't be used, the disk is full, or a process was
            ended; whole shards stay.
    """
    started = time.perf_counter()
    found = find_sources(list(sources))
    text, end = _tokenizer_of(options)
    encoder = Encoder(text, options)
    kind = TokenKind(encoder.vocab_size, text, None if end is None else encoder.token(end))
    splits = options.bad_unicode != "skip" and encoder.may_split()
    settings = {
        "sources": [[source.name, source.size] for source in found],
        "key": options.key,
        "bad_unicode": options.bad_unicode,
    }
    counts = Counts()
    with ShardWriter(folder, kind, shard_tokens=options.shard_tokens, settings=settings) as writer:
        first = writer.consumed
        chunks = islice(chunks_of(found, key=options.key, splits=splits), first, None)
        for number, each in enumerate(_encoded(chunks, encoder), first + 1):
            writer.extend(each.tokens, each.lengths, consumed=number, goes_on=each.goes_on)
            counts.num_bytes += each.counts.num_bytes
            counts.num_empty += each.counts.num_empty
            counts.num_bad += each.counts.num_bad
        index = writer.close()
    return Prepared(index, counts, time.perf_counter() - started)


def _tokenizer_of(options: PrepareOptions) -> tuple[str, str | None]:
    """The text of tokenizer.json, and the token that ends a document."""
    path = Path(options.tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        tokenizer_digest(text)
    except FileNotFoundError:
        raise CorpusError(
            f"tokenizer {file} does not exist; name a tokenizer.json, or a folder that has one"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise CorpusError(f"tokenizer {file} can't be read ({error}); fetch it again") from None
    if options.end == "none":
        return text, None
    if options.end or not path.is_dir():
        return text, options.end or None
    folder = FolderTokenizer(path)
    token = folder.eos_token_id
    names = {number: name for name, number in folder.tokens.items()}
    return text, None if token is None else names[token]


class Encoder:
    """Chunks to tokens, in this process.

    Args:
        text: Of tokenizer.json.
        options: How texts are read.
    """

    def __init__(self, text: str, options: PrepareOptions) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise CorpusError(
                f"{options.tokenizer} needs the package tokenizers: pip install tokenizers"
            ) from None
        try:
            self._inner: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises Exception itself
            raise CorpusError(
                f"tokenizer {options.tokenizer} is none ({error}); fetch it again"
            ) from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.text, self.options = text, options
        self.vocab_size = 1 + max(self._inner.get_vocab().values(), default=-1)
        # encode_batch_fast leaves out where each token is in the text; older versions have none.
        self._encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)

    def token(self, name: str) -> int:
        """The number of a token.

        Raises:
            CorpusError: There is none of this name.
        """
        found = self._inner.token_to_id(name)
        if found is None:
            raise CorpusError(
                f"tokenizer {self.options.tokenizer} has no token {name!r}; name one that ends a "
                "document by --end, or none"
            )
        return int(found)

    def may_split(self) -> bool:
        """Whether a text has the same tokens in two pieces, cut behind a line; those of a tokenizer
        that puts something before each text are not."""

        def ids(text: str) -> list[int]:
            found: list[int] = self._inner.encode(text, add_special_tokens=False).ids
            return found

        return all(ids(a + b) == ids(a) + ids(b) for a, b in PROBES)

    def __call__(self, chunk: Chunk) -> Encoded:
        """The tokens of a chunk.

        Raises:
            CorpusError: A document is no text, by its place.
        """
        counts, texts = Counts(), []
        for i, item in enumerate(chunk.items):
            text = self._text_of(chunk, i, item, counts)
            if text is not None:
                texts.append(text)
        lists = [found.ids for found in self._encode(texts, add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
        # A piece of a document may be empty, a document may not.
        kept = lengths > 0
        if kept.size:
            kept[-1] |= chunk.goes_on
            kept[0] |= chunk.continues
        counts.num_empty += int((~kept).sum())
        tokens = np.fromiter(
            (token for ids in lists for token in ids), dtype=np.uint32, count=int(lengths.sum())
        )
        return Encoded(tokens, lengths[kept], chunk.goes_on, counts)

    def _text_of(self, chunk: Chunk, i: int, item: Any, counts: Counts) -> str | None:
        """A document's text; None where it is skipped."""
        try:
            text = self._parsed(chunk, i, item)
            counts.num_bytes += len(text.encode())
            return text
        except UnicodeError as error:
            if self.options.bad_unicode == "refuse":
                raise CorpusError(
                    f"{chunk.place(i)}: the text is no UTF-8 ({error}); correct it, or give "
                    "--bad-unicode replace or skip"
                ) from None
        counts.num_bad += 1
        if self.options.bad_unicode == "skip":
            return None
        if isinstance(item, bytes):
            item = item.decode("utf-8", errors="replace").encode()
        text = self._parsed(chunk, i, item)
        # Halves of surrogate pairs, which JSON can name, become U+FFFD, too.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        counts.num_bytes += len(text.encode())
        return text

    def _parsed(self, chunk: Chunk, i: int, item: Any) -> str:
        if chunk.kind == "text":
            found: Any = item.decode()
        elif chunk.kind == "json":
            if not item.strip():
                return ""
            found = self._field(chunk, i, item.decode())
        else:
            found = "" if item is None else item
        if not isinstance(found, str):
            raise CorpusError(
                f"{chunk.place(i)}: {self.options.key!r} is {type(found).__name__}, not a text; "
                "name another by --key"
            )
        return found

    def _field(self, chunk: Chunk, i: int, line: str) -> Any:
        key = self.options.key
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise CorpusError(
                f"{chunk.place(i)}: no JSON ({error}); correct the line, or take it out"
            ) from None
        if not isinstance(fields, dict) or key not in fields:
            has = f"only {', '.join(fields)}" if isinstance(fields, dict) else "no object"
            raise CorpusError(
                f"{chunk.place(i)}: no text under {key!r}, {has}; name another by --key"
            )
        return "" if fields[key] is None else fields[key]


_worker: Encoder | None = None  # of a process that tokenizes


def _start_worker(text: str, options: PrepareOptions) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = Encoder(text, options)


def _encode_chunk(chunk: Chunk) -> Encoded:
    assert _worker is not None
    return _worker(chunk)


def _encoded(chunks: Iterator[Chunk], encoder: Encoder) -> Iterator[Encoded]:
    """The chunks as tokens, in their order."""
    count = encoder.options.workers or len(os.sched_getaffinity(0))
    if count == 1:
        yield from map(encoder, chunks)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(
        count, context, initializer=_start_worker, initargs=(encoder.text, encoder.options)
    )
    under_way: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            under_way.append(pool.submit(_encode_chunk, chunk))
            if len(under_way) > 3 * count:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise CorpusError(
            "a process that tokenized was ended, perhaps for lack of memory; repeat the command, "
            "which goes on behind the last whole shard, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
