"""SequenceRows and packed_rows: the rows of T tokens that a data set has, by number.

    SequenceRows   | T | T | T | ...          one behind the other, whatever document they are of
    packed_rows    whole documents, as `pyops.data.PackedRows`: best fit within windows of 8,192
                   documents, written to the cache once and mapped

Both have a length and `batch(numbers)`, which makes the tensors that a model takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import on_first_rank
from pyops.data import CorpusError, PackedRows, pack
from pyops.data.cache import build_aside
from pyops.token_data.tokens import Tokens

__all__ = ["Rows", "SequenceRows", "packed_rows"]

WINDOW = 1 << 13  # documents that are packed together


class Rows(Protocol):
    """Numbered rows."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Some of them, as a model takes them.

        Args:
            rows: Their numbers.
        """
        ...


class SequenceRows:
    """Row i has the tokens i T to i T + T - 1, and those one later as targets.

    Args:
        tokens: Of the data set.
        sequence_length: T.

    Raises:
        CorpusError: There is not one row.
    """

    def __init__(self, tokens: Tokens, *, sequence_length: int) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length is {sequence_length}; a row has 1 token or more")
        self.tokens, self.sequence_length = tokens, sequence_length
        if not len(self):
            raise CorpusError(
                f"{tokens.path} has {tokens.num_tokens} tokens, fewer than one sequence of "
                f"{sequence_length} and its next token; give more text, or lower "
                "model.sequence_length"
            )

    def __len__(self) -> int:
        return (self.tokens.num_tokens - 1) // self.sequence_length

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Some rows as a model takes them.

        Args:
            rows: Their numbers.

        Returns:
            "tokens_BT" and "targets_BT", int64 [B, T].

        Raises:
            CorpusError: A token is not in the vocabulary of the data set.
        """
        length, vocabulary = self.sequence_length, self.tokens.vocab_size
        found = np.empty((len(rows), length + 1), dtype=np.int64)
        for i, row in enumerate(rows):
            found[i] = self.tokens.read(row * length, length + 1)
        if vocabulary and found.size and found.max() >= vocabulary:
            i, j = np.argwhere(found >= vocabulary)[0].tolist()
            place = self.tokens.place_of(rows[i] * length + j)
            raise CorpusError(
                f"token {found[i, j]} ({place}) is not in a vocabulary of {vocabulary}; the file "
                "was changed, or has tokens of another tokenizer"
            )
        text = torch.from_numpy(found)
        return {"tokens_BT": text[:, :-1], "targets_BT": text[:, 1:]}


def packed_rows(
    tokens: Tokens,
    *,
    sequence_length: int,
    cache: Path | str,
    group: dist.ProcessGroup | None = None,
) -> PackedRows:
    """Rows of whole documents. The first rank packs them, unless the cache has them.

    Args:
        tokens: Of the data set, whose format says where documents begin.
        sequence_length: T, the tokens of a row.
        cache: The folder for what was packed, which all ranks see.
        group: The ranks that open it; None: all.

    Raises:
        CorpusError: On every rank alike: the documents are not known, or the cache can't be
            written.
    """
    key = json.dumps([tokens.digest, sequence_length, WINDOW])
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    folder = Path(cache).expanduser() / f"packed-{name}"

    def build() -> None:
        if not (folder / "meta.json").exists():
            build_aside(folder, lambda aside: _write(tokens, sequence_length, aside))

    on_first_rank(build, group=group)
    meta = json.loads((folder / "meta.json").read_text())
    pieces = np.memmap(folder / "pieces", "<i8", "r", shape=(meta["pieces"], 3))
    firsts = np.memmap(folder / "firsts", "<i8", "r", shape=(meta["rows"] + 1,))
    array: Any = tokens  # which is sliced as an array is
    return PackedRows(array, sequence_length, pieces, firsts)


def _write(tokens: Tokens, length: int, folder: Path) -> None:
    """Pack the documents of each shard, a window after the other, into files of `folder`."""
    pieces = rows = 0
    nothing = np.zeros(0)
    with open(folder / "pieces", "wb") as piece_file, open(folder / "firsts", "wb") as first_file:
        first_file.write(np.zeros(1, "<i8").tobytes())
        for part in range(len(tokens.parts)):
            starts = tokens.starts_of(part)
            for first in range(0, starts.size - 1, WINDOW):
                own = pack(nothing, starts[first : first + WINDOW + 1], sequence_length=length)
                piece_file.write(own.pieces.astype("<i8").tobytes())
                first_file.write((own.first_pieces[1:] + pieces).astype("<i8").tobytes())
                pieces, rows = pieces + len(own.pieces), rows + len(own)
    if not rows:
        raise CorpusError(
            f"{tokens.path} has no document of two tokens or more, and nothing is learnt from "
            "shorter ones; give more text"
        )
    (folder / "meta.json").write_text(json.dumps({"pieces": pieces, "rows": rows}))
