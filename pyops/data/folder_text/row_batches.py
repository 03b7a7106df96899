"""RowBatches: this rank's rows of each step, the same global batch on any number of ranks.

global batch of step n     row 5 | row 0 | row 9 | row 2     all filled up to one length
                           dp 0          | dp 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyops.data.corpus import CorpusError
from pyops.data.folder_text.token_rows import TokenRows
from pyops.data.row_order import RowOrder

__all__ = ["RowBatches", "RowShare", "held_out_batches"]

LENGTHS = 64  # rows are filled up to a multiple: few lengths, which several ranks can cut


@dataclass(frozen=True)
class RowShare:
    """Which rows of a global batch a rank has, and how they are filled up."""

    global_batch: int
    """Rows of a step, over all ranks."""

    sequence_length: int
    """The tokens of a row, at most."""

    pad_token_id: int
    """What shorter rows are filled with."""

    rank: int = 0
    """This copy of the model."""

    num_ranks: int = 1
    """The copies of the model, which divide the global batch."""

    def of(self, rows: TokenRows, chosen: Sequence[int]) -> dict[str, Tensor]:
        """This rank's part of some rows, of which there are at most a global batch.

        Args:
            rows: All rows.
            chosen: The numbers of those of the global batch.
        """
        each = self.global_batch // self.num_ranks
        own = chosen[self.rank * each : (self.rank + 1) * each]
        longest = max(map(rows.length, chosen))
        length = min(self.sequence_length, -(-longest // LENGTHS) * LENGTHS)
        return rows.batch(own, length=length, pad_token_id=self.pad_token_id)


class RowBatches:
    """Endless batches, as one copy of the model sees them.

    Args:
        rows: All rows.
        chosen: The numbers of those to train on.
        share: Of this rank.
        seed: Of the order in each epoch.

    Raises:
        CorpusError: There are fewer rows than a global batch has.
    """

    def __init__(
        self, rows: TokenRows, chosen: Sequence[int], share: RowShare, *, seed: int
    ) -> None:
        if len(chosen) < share.global_batch:
            rows_found = f"{len(chosen)} row{'s' * (len(chosen) != 1)}"
            raise CorpusError(
                f"data.path {rows.path} has {rows_found} to train on, fewer than a batch of "
                f"{share.global_batch}; give more text, or lower train.batch or "
                "model.sequence_length"
            )
        self._rows, self._chosen, self._share = rows, chosen, share
        self._order = RowOrder(len(chosen), global_batch=share.global_batch, seed=seed)

    def next(self) -> dict[str, Tensor]:
        """This rank's rows of the next global batch: "input_ids" and "labels"."""
        return self._share.of(self._rows, [self._chosen[i] for i in self._order.next()])

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the same on all ranks: {digest, num_rows, batch, seed, epoch, position}."""
        order = self._order
        return {
            "digest": self._rows.digest,
            "num_rows": order.num_rows,
            "seed": order.seed,
            "epoch": order.epoch,
            "position": order.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the batch after which `state` was taken.

        Raises:
            CorpusError: It is of other rows, or of another order.
        """
        self._order.resume(
            state,
            own=self.state_dict(),
            fixes={
                "digest": "the same data.path, data.long_rows, model.sequence_length and tokenizer",
                "num_rows": "the same data.validation_fraction",
                "seed": "the same train.seed",
            },
        )


def held_out_batches(
    rows: TokenRows, chosen: Sequence[int], share: RowShare
) -> Iterator[dict[str, Tensor]]:
    """The chosen rows once, as this copy of the model sees them; copies have equally many batches,
    of which the last ones may have no rows.

    Args:
        rows: All rows.
        chosen: The numbers of those to take.
        share: Of this rank.
    """
    for begin in range(0, len(chosen), share.global_batch):
        yield share.of(rows, chosen[begin : begin + share.global_batch])
