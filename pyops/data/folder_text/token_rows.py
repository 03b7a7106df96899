"""TokenRows: rows of tokens on disk, and which of them are learnt.

<data.cache>/<digest>/   tokens.bin   all rows, one behind the other
                         starts.bin   where each begins, and where the last one ends
                         learns.bin   of instructions: which tokens are learnt; of text all are
                         meta.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import on_first_rank, ranks_agree
from pyops.data.cache import build_aside
from pyops.data.corpus import CorpusError, DataConfig, Document, find_documents
from pyops.data.folder_text.folder_tokenizer import FolderTokenizer
from pyops.data.folder_text.instructions import learnt_of, read_lines

__all__ = ["IGNORED", "RowOptions", "TokenRows", "prepare_rows"]

FORMAT = 1
IGNORED = -100  # a label that does not count
LINES = ".jsonl"
PIECE_BYTES = 1 << 20
DTYPES = {"tokens": np.uint32, "starts": np.int64, "learns": np.uint8}


@dataclass(frozen=True)
class RowOptions:
    """How text becomes rows."""

    sequence_length: int
    """The tokens of a row, at most."""

    long_rows: str = "refuse"
    """Instructions with more: "refuse" or "truncate", which keeps their beginning."""

    keeps_rest: bool = False
    """Whether the end of a text that fills no row is a shorter row; else it is left out."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            CorpusError: Naming field, value and fix.
        """
        if self.sequence_length < 2:
            raise CorpusError(
                f"sequence_length is {self.sequence_length}; it must be 2 or more: a token is "
                "learnt from those before it"
            )


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens, mapped from files.

    Attributes:
        path: Of the text.
        tokens: All rows, one behind the other.
        starts: Where each row begins, and where the last one ends.
        learns: Which tokens are learnt, 0 or 1; None: all.
        digest: Of the text, the tokenizer and the options: equal digests mean equal rows.
        num_truncated: How many rows of instructions were cut.
        num_left_out: How many had nothing to learn from when they were cut.
    """

    path: str
    tokens: np.ndarray
    starts: np.ndarray
    learns: np.ndarray | None
    digest: str
    num_truncated: int = 0
    num_left_out: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(np.diff(self.starts).max(initial=0))

    @property
    def num_learnt(self) -> int:
        """How many tokens are learnt: the first one of a row, before which there is none, never."""
        if self.learns is None:
            return int(self.starts[-1]) - len(self)
        return int(self.learns.sum(dtype=np.int64) - self.learns[self.starts[:-1]].sum())

    def length(self, row: int) -> int:
        """The tokens of a row."""
        return int(self.starts[row + 1] - self.starts[row])

    def batch(self, rows: Sequence[int], *, length: int, pad_token_id: int) -> dict[str, Tensor]:
        """Some rows as a model takes them.

        Args:
            rows: Their numbers.
            length: Shorter rows are filled up to it, on the right.
            pad_token_id: What they are filled with.

        Returns:
            {"input_ids": int64 [rows, length], "labels": the same, IGNORED where nothing is learnt}
        """
        tokens = np.full((len(rows), length), pad_token_id, dtype=np.int64)
        labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
        for i, row in enumerate(rows):
            where = slice(int(self.starts[row]), int(self.starts[row + 1]))
            here = self.tokens[where].astype(np.int64)
            tokens[i, : len(here)] = here
            if self.learns is not None:
                here = np.where(self.learns[where] != 0, here, IGNORED)
            labels[i, : len(here)] = here
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def split(self, fraction: float) -> tuple[range | list[int], list[int]]:
        """(rows to train on, rows held out): the end of a text; of instructions one in so many.

        Args:
            fraction: The part that is held out, one row at least.

        Raises:
            CorpusError: There are fewer than two rows.
        """
        count = len(self)
        if count < 2:
            raise CorpusError(
                f"data.path {self.path} has {count} row{'s' * (count != 1)}, and one is held out: "
                "nothing to learn from is left; give more text, or lower model.sequence_length"
            )
        held = min(count - 1, max(1, round(count * fraction)))
        if self.learns is None:
            return range(count - held), list(range(count - held, count))
        chosen = {i * count // held for i in range(held)}
        return [row for row in range(count) if row not in chosen], sorted(chosen)


def prepare_rows(
    config: DataConfig,
    tokenizer: FolderTokenizer,
    options: RowOptions,
    *,
    group: dist.ProcessGroup | None = None,
) -> TokenRows:
    """Cut the text into tokens, unless the cache has them, and open the rows. Rank 0 of the group
    works, the others wait.

    Args:
        config: The text: files of text, or of instructions where their names end with .jsonl.
        tokenizer: Of the model's folder.
        options: How text becomes rows.
        group: The ranks that open them; None: all.

    Raises:
        CorpusError: On every rank alike, for text that can't be used; of a line of JSON with
            file:line.
    """
    folder = on_first_rank(lambda: _build_once(config, tokenizer, options), group=group)
    with ranks_agree(group):
        return _open(config, folder)


def _build_once(config: DataConfig, tokenizer: FolderTokenizer, options: RowOptions) -> Path:
    options.validate()
    documents = find_documents(config)
    lines = [document for document in documents if document.name.endswith(LINES)]
    _check_kind(config, documents, lines)
    settings = (FORMAT, tokenizer.digest, options, config.max_bytes, bool(lines))
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for document in documents:
        digest.update(f"{document.name} {document.size} ".encode())
        for piece in _pieces(document):
            digest.update(piece)
    folder = Path(config.cache).expanduser() / digest.hexdigest()
    if (folder / "meta.json").exists():
        return folder
    made = _Made()
    if lines:
        _add_instructions(made, documents, tokenizer, options)
    else:
        _add_text(made, documents, tokenizer, options, max_bytes=config.max_bytes)
    if not made.lengths:
        left_out = (
            f"all {made.left_out} rows were cut before what the assistant says"
            if made.left_out
            else f"it fills no row of {options.sequence_length} tokens"
        )
        raise CorpusError(
            f"data.path {config.path} has nothing to learn from: {left_out}; give more text, or "
            f"{'raise' if made.left_out else 'lower'} model.sequence_length"
        )
    return build_aside(folder, made.write)


def _check_kind(
    config: DataConfig, documents: Sequence[Document], lines: Sequence[Document]
) -> None:
    if lines and len(lines) < len(documents):
        raise CorpusError(
            f"data.path {config.path} has {len(lines)} files of instructions ({LINES}) and "
            f'{len(documents) - len(lines)} of text; set data.suffixes to ["{LINES}"], or to those '
            "of the text"
        )
    if lines and config.max_bytes:
        raise CorpusError(
            f"data.max_bytes is {config.max_bytes}, but {lines[0].path} has instructions, of which "
            "no line is cut; set it to 0"
        )


@dataclass
class _Made:
    """What is written to the cache."""

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    learns: list[np.ndarray] | None = None
    truncated: int = 0
    left_out: int = 0

    def write(self, folder: Path) -> None:
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        arrays = {"tokens": np.concatenate(self.tokens)[: starts[-1]], "starts": starts}
        if self.learns is not None:
            arrays["learns"] = np.concatenate(self.learns)
        for name, array in arrays.items():
            array.astype(DTYPES[name]).tofile(folder / f"{name}.bin")
        meta = {
            "sizes": {name: len(array) for name, array in arrays.items()},
            "truncated": self.truncated,
            "left_out": self.left_out,
        }
        (folder / "meta.json").write_text(json.dumps(meta))


def _add_instructions(
    made: _Made,
    documents: Sequence[Document],
    tokenizer: FolderTokenizer,
    options: RowOptions,
) -> None:
    length, made.learns = options.sequence_length, []
    for document in documents:
        for place, value in read_lines(document.path):
            row = learnt_of(value, tokenizer, place=place)
            if len(row.tokens) > length and options.long_rows == "refuse":
                raise CorpusError(
                    f"{place} has {len(row.tokens)} tokens, but model.sequence_length is {length}; "
                    "shorten the row, raise model.sequence_length, or set data.long_rows to "
                    '"truncate", which keeps the beginning'
                )
            made.truncated += len(row.tokens) > length
            if not row.learns[1:length].any():
                made.left_out += 1
                continue
            made.tokens.append(row.tokens[:length].astype(DTYPES["tokens"]))
            made.learns.append(row.learns[:length])
            made.lengths.append(len(made.tokens[-1]))


def _add_text(
    made: _Made,
    documents: Sequence[Document],
    tokenizer: FolderTokenizer,
    options: RowOptions,
    *,
    max_bytes: int,
) -> None:
    left = max_bytes or sum(document.size for document in documents)
    end = tokenizer.eos_token_id
    for document in documents:
        last = -1
        for number, piece in enumerate(_pieces(document)):
            text = piece[:left].decode("utf-8", errors="replace")
            tokens = tokenizer.encode(text, begins=number == 0) if text else np.zeros(0, int)
            left -= len(piece[:left])
            if len(tokens):
                made.tokens.append(tokens.astype(DTYPES["tokens"]))
                last = int(tokens[-1])
        if end is not None and last not in (-1, end):
            made.tokens.append(np.array([end], dtype=DTYPES["tokens"]))
    rows, rest = divmod(sum(map(len, made.tokens)), options.sequence_length)
    made.lengths = [options.sequence_length] * rows
    if options.keeps_rest and rest > 1:
        made.lengths.append(rest)


def _pieces(document: Document) -> Iterator[bytes]:
    """The text of a document in pieces of whole lines."""
    try:
        with open(document.path, "rb") as file:
            while piece := file.read(PIECE_BYTES) + file.readline():
                yield piece
    except OSError as error:
        raise CorpusError(
            f"corpus file {document.path} can't be read: {error.strerror}; fix its permissions, or "
            "leave it out"
        ) from None


def _open(config: DataConfig, folder: Path) -> TokenRows:
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        arrays = {}
        for name, size in meta["sizes"].items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != size * np.dtype(DTYPES[name]).itemsize:
                raise ValueError(f"{path} has {path.stat().st_size} bytes")
            arrays[name] = np.memmap(path, dtype=DTYPES[name], mode="r")
        return TokenRows(
            config.path,
            arrays["tokens"],
            arrays["starts"],
            arrays.get("learns"),
            folder.name,
            meta["truncated"],
            meta["left_out"],
        )
    except FileNotFoundError as error:
        raise CorpusError(
            f"the token cache {error.filename} is not there on this rank; set data.cache to a "
            "folder that all ranks share"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"the token cache {folder} is damaged ({error}); delete that folder, it is built anew"
        ) from None
