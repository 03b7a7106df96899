"""Rows of whole documents: each says where its documents begin, and places begin again with each.

    tokens       a b c d x y z p q -        - is padding: no further document fits
    documents    0 0 0 0 1 1 1 2 2 -1       the operation of attention sees none of another number
    positions    0 1 2 3 0 1 2 0 1 0
    targets      b c d - y z - q - -        - is -100: what follows a document is not learnt from it

A document of more tokens than a row is cut into pieces of a whole row each and a rest. Its pieces
do not see each other, but the target of a piece's last token is the first one of the next: over
all rows every token but the first of each document is learnt once.

Rows are filled by best fit, longest first: each piece goes to the row with the least room that has
enough (as in Ding et al., 2024). Which row has which documents is a function of the corpus and the
length of a row alone; their order in an epoch is that of (seed, epoch).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyops.attention import document_positions
from pyops.data.cache import Corpus
from pyops.data.corpus import CorpusError
from pyops.data.row_order import RowOrder, check_share

__all__ = ["PackedBatches", "PackedRows", "pack", "packed_validation_rows"]

IGNORED = -100  # a target that does not count


@dataclass(frozen=True)
class PackedRows:
    """Which documents, or pieces of long ones, each row has."""

    tokens: np.ndarray
    """The text, all documents one behind the other: [n]."""
    sequence_length: int
    """T, the tokens of a row."""
    pieces: np.ndarray
    """int64 [m, 3], in the order of rows: where each begins in `tokens`, its length, and 1 where
    the document goes on behind it."""
    first_pieces: np.ndarray
    """int64 [rows + 1]: the first piece of each row, and how many there are."""

    def __len__(self) -> int:
        return len(self.first_pieces) - 1

    @property
    def fill(self) -> float:
        """The part of the places that are no padding."""
        places = len(self) * self.sequence_length
        return int(self.pieces[:, 1].sum()) / places if places else 0.0

    @property
    def num_targets(self) -> int:
        """How many tokens are learnt in an epoch."""
        return int((self.pieces[:, 1] - 1 + self.pieces[:, 2]).sum())

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Some rows as a model takes them.

        Args:
            rows: Their numbers.

        Returns:
            "tokens_BT" int64 [B, T], 0 for padding; "targets_BT" int64 [B, T], -100 where nothing
            is learnt; "documents_BT" int32 [B, T], counted in each row, -1 for padding;
            "positions_BT" int64 [B, T].
        """
        shape = (len(rows), self.sequence_length)
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        documents = np.full(shape, -1, dtype=np.int32)
        for i, row in enumerate(rows):
            end = 0
            own = self.pieces[self.first_pieces[row] : self.first_pieces[row + 1]]
            for number, (start, length, goes_on) in enumerate(own.tolist()):
                text = self.tokens[start : start + length + goes_on]
                here = slice(end, end + length)
                tokens[i, here] = text[:length]
                targets[i, end : end + len(text) - 1] = text[1:]
                documents[i, here] = number
                end += length
        found = torch.from_numpy(documents)
        return {
            "tokens_BT": torch.from_numpy(tokens),
            "targets_BT": torch.from_numpy(targets),
            "documents_BT": found,
            "positions_BT": document_positions(found),
        }


def pack(tokens: np.ndarray, starts: np.ndarray, *, sequence_length: int) -> PackedRows:
    """Documents as rows.

    Args:
        tokens: The documents, one behind the other: [n].
        starts: int64 [documents + 1]: where each begins, and where the last one ends.
        sequence_length: T, the tokens of a row.

    Returns:
        The rows; documents of one token, from which nothing is learnt, are left out.

    Raises:
        ValueError: When a row would have no token.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length is {sequence_length}; a row has 1 token or more")
    pieces = _pieces(np.asarray(starts, dtype=np.int64), sequence_length)
    row_of, num_rows = _best_fit(pieces[:, 1], sequence_length)
    order = np.lexsort((pieces[:, 0], row_of))
    counts = np.bincount(row_of, minlength=num_rows)
    return PackedRows(
        tokens, sequence_length, pieces[order], np.concatenate([[0], np.cumsum(counts)])
    )


def _pieces(starts: np.ndarray, length: int) -> np.ndarray:
    """Each document cut into pieces of at most `length` tokens: (start, length, goes on)."""
    sizes = np.diff(starts)
    counts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin, end = starts[:-1][document] + number * length, starts[1:][document]
    own = np.minimum(end - begin, length)
    goes_on = begin + own < end
    every = np.stack([begin, own, goes_on.astype(np.int64)], axis=1)
    found: np.ndarray = every[own + goes_on > 1]  # the others teach nothing
    return found


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(the row of each piece, the number of rows)."""
    row_of = np.zeros(len(lengths), dtype=np.int64)
    open_rows: dict[int, list[int]] = {}  # by the room that is left, which is in `rooms`, ascending
    rooms: list[int] = []
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = num_rows, capacity
            num_rows += 1
        else:
            room = rooms[place]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[place]
        row_of[piece] = row
        if left := room - length:
            if left not in open_rows:
                open_rows[left] = []
                bisect.insort(rooms, left)
            open_rows[left].append(row)
    return row_of, num_rows


class PackedBatches:
    """Endless batches of packed rows of the train part of a corpus, as one of `num_ranks` ranks
    sees them: the same global batch on any number of ranks.

    Args:
        corpus: Of `prepare`, with packing = "documents".
        sequence_length: T, the tokens of a row.
        global_batch: Rows in a step, over all ranks.
        seed: Of the order of rows in each epoch.
        rank: This rank.
        num_ranks: The number of ranks that share a batch.

    Attributes:
        rows: All rows.

    Raises:
        ValueError: When the ranks do not divide the global batch; CorpusError when the corpus knows
            no documents, or has fewer rows than one global batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        global_batch: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        check_share(rank=rank, num_ranks=num_ranks, global_batch=global_batch)
        self.rows = pack(corpus.train, _starts(corpus, "train"), sequence_length=sequence_length)
        if len(self.rows) < global_batch:
            raise CorpusError(
                f"corpus {corpus.path} has {len(self.rows)} rows of {sequence_length} tokens to "
                f"train on, fewer than a global batch of {global_batch}; give more text, or lower "
                "train.batch or model.sequence_length"
            )
        self._corpus, self._seed = corpus, seed
        self.global_batch, self._rank, self._rows = global_batch, rank, global_batch // num_ranks
        self._order = RowOrder(len(self.rows), global_batch=global_batch, seed=seed)

    def next(self) -> dict[str, Tensor]:
        """This rank's rows of the next global batch, as `PackedRows.batch` has them."""
        return self.rows.batch(self._order.next()[self.first_row : self.first_row + self._rows])

    @property
    def first_row(self) -> int:
        """Where this rank's rows begin in the global batch."""
        return self._rank * self._rows

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the same on all ranks: {digest, seed, sequence_length, epoch, position}."""
        return {
            "digest": self._corpus.digest,
            "seed": self._seed,
            "sequence_length": self.rows.sequence_length,
            "epoch": self._order.epoch,
            "position": self._order.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the batch after which `state` was taken.

        Raises:
            CorpusError: When it is of another order.
        """
        self._order.resume(
            state,
            own=self.state_dict(),
            fixes={
                "digest": "the same corpus, data.packing, data.tokenizer and "
                "data.validation_fraction",
                "seed": "the same train.seed",
                "sequence_length": "the same model.sequence_length",
            },
        )


def packed_validation_rows(
    corpus: Corpus, *, sequence_length: int, num_sequences: int, rank: int = 0, num_ranks: int = 1
) -> dict[str, Tensor]:
    """This rank's share of at most `num_sequences` packed rows spread evenly over those of the
    validation part, as `PackedRows.batch` has them; on some ranks there may be none.

    Args:
        corpus: Of `prepare`, with packing = "documents".
        sequence_length: T, the tokens of a row.
        num_sequences: At most so many, over all ranks.
        rank: This rank.
        num_ranks: The number of ranks that share them.
    """
    rows = pack(corpus.validation, _starts(corpus, "validation"), sequence_length=sequence_length)
    count = min(num_sequences, len(rows))
    return rows.batch([i * len(rows) // count for i in range(count)][rank::num_ranks])


def _starts(corpus: Corpus, part: str) -> np.ndarray:
    found: np.ndarray | None = getattr(corpus, f"{part}_starts")
    if found is None:
        raise CorpusError(
            f"corpus {corpus.path} was prepared without the starts of its documents; prepare it "
            'with data.packing = "documents"'
        )
    return found
