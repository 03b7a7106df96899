"""The order of the sequences: a function of (seed, epoch), the same global batch on any number of
ranks.

epoch e:   permutation of the corpus' sequences, keyed by (seed, e)
           | global batch 0 | global batch 1 | ... | what fills no batch is left out
           | rank 0 | rank 1 |                       each rank takes its rows of each global batch
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyops.data.cache import Corpus
from pyops.data.corpus import CorpusError
from pyops.data.row_order import RowOrder, check_share

__all__ = ["Batches", "validation_rows"]


class Batches:
    """Endless batches of the train part of a corpus, as one of `num_ranks` ranks sees them.

    Sequence i is the tokens [i T, i T + T], T + 1 of them: inputs and, one later, targets.

    Args:
        corpus: The tokens.
        sequence_length: T, the tokens that a sequence predicts.
        global_batch: Sequences in a step, over all ranks.
        seed: Of the order of sequences in each epoch.
        rank: This rank.
        num_ranks: The number of ranks that share a batch.

    Raises:
        ValueError: When the ranks do not divide the global batch, CorpusError when the corpus has
            fewer sequences than one global batch.
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
        self.num_sequences = (corpus.train.size - 1) // sequence_length
        if self.num_sequences < global_batch:
            raise CorpusError(
                f"corpus {corpus.path} has {self.num_sequences} sequences of "
                f"{sequence_length} tokens to train on, "
                f"fewer than a global batch of {global_batch}; give more text, or lower "
                "train.batch or model.sequence_length"
            )
        self._corpus, self._length = corpus, sequence_length
        self.global_batch, self._seed = global_batch, seed
        self._rank, self._rows = rank, global_batch // num_ranks
        self._order = RowOrder(self.num_sequences, global_batch=global_batch, seed=seed)

    def next(self) -> Tensor:
        """This rank's rows of the next global batch: int64 [global_batch / num_ranks, T + 1]."""
        chosen = self._order.next()[self.first_row : self.first_row + self._rows]
        return _read_rows(self._corpus.train, chosen, self._length)

    @property
    def first_row(self) -> int:
        """Where this rank's rows begin in the global batch."""
        return self._rank * self._rows

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the same on all ranks: {digest, seed, sequence_length, epoch, position}."""
        return {
            "digest": self._corpus.digest,
            "seed": self._seed,
            "sequence_length": self._length,
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
                "digest": "the same corpus, data.tokenizer and data.validation_fraction",
                "seed": "the same train.seed",
                "sequence_length": "the same model.sequence_length",
            },
        )


def validation_rows(
    corpus: Corpus, *, sequence_length: int, num_sequences: int, rank: int = 0, num_ranks: int = 1
) -> Tensor:
    """This rank's share of at most `num_sequences` sequences spread evenly over the validation
    part: int64 [n, T + 1].

    n may be 0 on some ranks, when there are fewer sequences than ranks.

    Args:
        corpus: The tokens.
        sequence_length: T, the tokens that a sequence predicts.
        num_sequences: At most so many, over all ranks.
        rank: This rank.
        num_ranks: The number of ranks that share them.
    """
    available = (corpus.validation.size - 1) // sequence_length
    count = min(num_sequences, available)
    chosen = [i * available // count for i in range(count)][rank::num_ranks]
    return _read_rows(corpus.validation, chosen, sequence_length)


def _read_rows(tokens: np.ndarray, sequences: list[int], length: int) -> Tensor:
    rows = np.empty((len(sequences), length + 1), dtype=np.int64)
    for row, i in zip(rows, sequences, strict=True):
        row[:] = tokens[i * length : i * length + length + 1]
    return torch.from_numpy(rows)
