"""chunks_of: text files, JSONL, Parquet and Hugging Face datasets as chunks of documents, in an
order that depends on nothing but the sources.

    notes.txt, *.md, ...     a document each; a large one in pieces of whole lines
    *.jsonl, *.jsonl.gz      a document a line: {"text": "..."}; .zst by the package zstandard
    *.parquet                a document a row of the column "text", by the package pyarrow
    hf:NAME@CONFIG:SPLIT     rows of a dataset, by the package datasets; or a folder that it saved
    folder                   all of these in it, by name
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pyops.data import CorpusError

__all__ = ["Chunk", "Source", "chunks_of", "find_sources"]

CHUNK_BYTES = 1 << 19
PIECE_BYTES = 1 << 20
# A cut that changes no token: most tokenizers take a line's end to the white space behind it.
CUT = re.compile(rb"\n(?=[!-~])")
BOM = b"\xef\xbb\xbf"
HUB = "hf:"


@dataclass(frozen=True)
class Source:
    """One file, or one dataset."""

    name: str
    """As messages call it."""
    kind: str
    """"text", "json", "parquet" or "dataset"."""
    size: int
    """Bytes of the file; 0 of a dataset."""


@dataclass(frozen=True)
class Chunk:
    """Some documents that lie side by side."""

    kind: str
    """"text": bytes of text; "json": lines of JSON; "string": texts."""
    places: tuple[str, ...]
    """Where each document is from, where `first` does not say it."""
    items: list[Any]
    """The documents."""
    source: str = ""
    """Where all are from."""
    first: int = 0
    """The number of the first one there, from 1."""
    goes_on: bool = False
    """Whether the last document goes on in the next chunk."""
    continues: bool = False
    """Whether the first document began in the chunk before."""

    def place(self, i: int) -> str:
        """Where document i of the chunk is from, in words."""
        word = "line" if self.kind == "json" else "row"
        return self.places[i] if self.places else f"{self.source}, {word} {self.first + i}"


def find_sources(paths: Sequence[str]) -> list[Source]:
    """The files and datasets that are meant.

    Args:
        paths: Files, folders, and datasets as hf:NAME@CONFIG:SPLIT.

    Raises:
        CorpusError: One does not exist, or a folder has no file.
    """
    found: list[Source] = []
    for given in paths:
        path = Path(given).expanduser()
        if given.startswith(HUB):
            found.append(Source(given, "dataset", 0))
        elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            found.append(Source(str(path), "dataset", 0))
        elif path.is_dir():
            files = sorted(each for each in path.rglob("*") if _is_text(each, path))
            if not files:
                raise CorpusError(f"source {given} has no file; name a folder of texts")
            found += [_file(each) for each in files]
        elif path.exists():
            found.append(_file(path))
        else:
            raise CorpusError(
                f"source {given} does not exist; name files, folders, or a dataset as "
                "hf:NAME@CONFIG:SPLIT"
            )
    if not found:
        raise CorpusError("there is no source; name files, folders, or a dataset as hf:NAME")
    return found


def _is_text(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.is_file() and not hidden


def _file(path: Path) -> Source:
    ends = "".join(path.suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix
    kind = "parquet" if ends == ".parquet" else "text"
    if ends.startswith((".jsonl", ".ndjson")):
        kind = "json"
    return Source(str(path), kind, path.stat().st_size)


def chunks_of(sources: Sequence[Source], *, key: str, splits: bool) -> Iterator[Chunk]:
    """All documents, in order.

    Args:
        sources: Of `find_sources`.
        key: Of the text in a line of JSON; the name of the column in Parquet and in datasets.
        splits: Whether a large text may be cut between two lines.

    Raises:
        CorpusError: A source can't be read, or needs a package that is not installed.
    """
    small: list[tuple[str, bytes]] = []  # whole texts, several to a chunk
    open_end = False
    for source in sources:
        if source.kind != "text":
            yield from _texts(small, continues=open_end)
            small, open_end = [], False
            yield from _rows(source, key)
            continue
        for text, goes_on in _pieces(source, splits=splits):
            small.append((source.name, text))
            if goes_on or sum(len(each) for _, each in small) >= CHUNK_BYTES:
                yield from _texts(small, goes_on=goes_on, continues=open_end)
                small, open_end = [], goes_on
    yield from _texts(small, continues=open_end)


def _texts(
    texts: list[tuple[str, bytes]], *, continues: bool, goes_on: bool = False
) -> Iterator[Chunk]:
    if texts:
        yield Chunk(
            "text",
            tuple(name for name, _ in texts),
            [text for _, text in texts],
            goes_on=goes_on,
            continues=continues,
        )


def _rows(source: Source, key: str) -> Iterator[Chunk]:
    if source.kind == "json":
        yield from _grouped(source, "json", _lines(source))
    elif source.kind == "parquet":
        yield from _grouped(source, "string", _parquet(source, key))
    else:
        yield from _grouped(source, "string", _dataset(source, key))


def _grouped(source: Source, kind: str, items: Iterable[Any]) -> Iterator[Chunk]:
    """Chunks of about `CHUNK_BYTES`."""
    first, size = 1, 0
    own: list[Any] = []
    for item in items:
        own.append(item)
        size += len(item) if isinstance(item, str | bytes) else 8
        if size >= CHUNK_BYTES:
            yield Chunk(kind, (), own, source.name, first)
            first, size, own = first + len(own), 0, []
    if own:
        yield Chunk(kind, (), own, source.name, first)


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked."""
    try:
        with open(source.name, "rb") as file:
            if source.name.endswith(".gz"):
                with gzip.open(file) as unpacked:
                    yield unpacked  # type: ignore[misc]  # reads bytes, too
            elif source.name.endswith(".zst"):
                zstandard = _package("zstandard", source)
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                yield io.BufferedReader(reader)
            else:
                yield file
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(
            f"source {source.name} can't be read: {reason}; fetch it again, or leave it out"
        ) from None


def _pieces(source: Source, *, splits: bool) -> Iterator[tuple[bytes, bool]]:
    """A text in pieces, and whether it goes on behind each."""
    with _opened(source) as file:
        text = file.read(PIECE_BYTES) if splits else file.read()
        text = text.removeprefix(BOM)
        while splits and (more := file.read(PIECE_BYTES)):
            text += more
            cuts = [found.end() for found in CUT.finditer(text, max(0, len(text) - (1 << 16)))]
            if cuts:
                yield text[: cuts[-1]], True
                text = text[cuts[-1] :]
        yield text, False


def _lines(source: Source) -> Iterator[bytes]:
    with _opened(source) as file:
        for number, line in enumerate(file):
            yield (line if number else line.removeprefix(BOM)).rstrip(b"\r\n")


def _parquet(source: Source, key: str) -> Iterator[Any]:
    parquet = _package("pyarrow.parquet", source)
    try:
        file = parquet.ParquetFile(source.name)
    except Exception as error:  # the package's own kinds
        raise CorpusError(f"source {source.name} is no Parquet ({error}); fetch it again") from None
    if key not in file.schema_arrow.names:
        raise CorpusError(
            f"source {source.name} has no column {key!r}, only "
            f"{', '.join(file.schema_arrow.names)}; name one by --key"
        )
    for batch in file.iter_batches(columns=[key], batch_size=1024):
        yield from batch.column(0).to_pylist()


def _dataset(source: Source, key: str) -> Iterator[Any]:
    datasets = _package("datasets", source)
    name, _, split = source.name.removeprefix(HUB).partition(":")
    try:
        if source.name.startswith(HUB):
            name, _, config = name.partition("@")
            rows = datasets.load_dataset(
                name, config or None, split=split or "train", streaming=True
            )
        else:
            rows = datasets.load_from_disk(source.name)
            rows = rows["train"] if isinstance(rows, dict) else rows
        for row in rows:
            if key not in row:
                raise CorpusError(
                    f"source {source.name} has no column {key!r}, only {', '.join(row)}; name one "
                    "by --key"
                )
            yield row[key]
    except CorpusError:
        raise
    except Exception as error:  # the package's own kinds
        raise CorpusError(f"source {source.name} can't be read: {error}") from error


def _package(name: str, source: Source) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        package = name.partition(".")[0]
        raise CorpusError(
            f"source {source.name} needs the package {package}: pip install {package}"
        ) from None
