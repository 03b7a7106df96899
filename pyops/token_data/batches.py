"""TokenBatches: endless batches of a mixture of data sets, each a function of its position alone.

    position p of the run    -> source and number n within it      by weights (`Mixture`)
    n of a source of N rows  -> epoch n div N, place n mod N
    place of an epoch        -> row                                `Permutation`, keyed by the epoch
    batch of step s          = positions s B ... (s + 1) B - 1; rank r of R has the r-th part

No order is stored and nothing runs through earlier positions: a run of any number of ranks goes on
at any position, with the position as its whole state. Each row of a source comes once in an epoch
of that source; a batch may lie across two epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyops.data import CorpusError
from pyops.data.row_order import check_share
from pyops.token_data.mixture import Mixture
from pyops.token_data.permutation import Permutation
from pyops.token_data.rows import Rows

__all__ = ["TokenBatches", "TokenSource", "held_out_places", "held_out_rows"]


class TokenSource:
    """A data set of a mixture: the rows before `held_out` of them are trained on, the others not.

    Args:
        rows: Of the data set.
        digest: Of its tokens.
        weight: Its part of the mixture, against the others' weights.
        held_out: The part of the rows, at their end, that is not trained on: from 0 to 1.

    Attributes:
        num_rows: That are trained on.

    Raises:
        CorpusError: Nothing is left to train on.
    """

    def __init__(
        self, rows: Rows, *, digest: str, weight: float = 1.0, held_out: float = 0.0
    ) -> None:
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is {held_out}; give a part from 0 to less than 1")
        self.rows, self.digest, self.weight = rows, digest, weight
        self.held_out = held_out
        self.num_rows = len(rows) - (max(1, round(len(rows) * held_out)) if held_out else 0)
        if self.num_rows < 1:
            raise CorpusError(
                f"a data set has {len(rows)} rows, none of which is left to train on where a part "
                f"of {held_out} is held out; give more text, or lower data.validation_fraction or "
                "model.sequence_length"
            )


class TokenBatches:
    """Endless batches, as one of `num_ranks` ranks sees them.

    Args:
        sources: The data sets, with their weights.
        global_batch: Rows in a step, over all ranks.
        seed: Of the order of rows in each epoch.
        rank: This rank.
        num_ranks: The number of ranks that share a batch.

    Attributes:
        position: Rows that were given so far, over all ranks.

    Raises:
        ValueError: When the ranks do not divide the global batch, or a weight is not above 0.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        *,
        global_batch: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        check_share(rank=rank, num_ranks=num_ranks, global_batch=global_batch)
        self.sources, self._seed, self.global_batch = list(sources), seed, global_batch
        self._mixture = Mixture([source.weight for source in sources])
        self._rank, self._rows = rank, global_batch // num_ranks
        self.position = 0

    @property
    def first_row(self) -> int:
        """Where this rank's rows begin in the global batch."""
        return self._rank * self._rows

    def next(self) -> dict[str, Tensor]:
        """This rank's rows of the next global batch, as its sources' `batch` has them."""
        first = self.position + self.first_row
        found = self.at(np.arange(first, first + self._rows))
        self.position += self.global_batch
        return found

    def at(self, positions: np.ndarray) -> dict[str, Tensor]:
        """The rows of these positions.

        Args:
            positions: Whole numbers, 0 or more: [B].
        """
        which, numbers = self._mixture(positions)
        places: list[np.ndarray] = []
        parts: list[dict[str, Tensor]] = []
        for source in np.unique(which):
            own = np.flatnonzero(which == source)
            places.append(own)
            parts.append(self.sources[source].rows.batch(self._rows_of(source, numbers[own])))
        return parts[0] if len(parts) == 1 else _in_order(parts, places)

    def _rows_of(self, source: int, numbers: np.ndarray) -> list[int]:
        """The rows that a source gives at these of its positions, whose epochs ascend."""
        count = self.sources[source].num_rows
        epochs, places = np.divmod(numbers, count)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            order = Permutation(count, seed=self._seed, name=f"tokens.{source}.epoch.{epoch}")
            own = epochs == epoch
            found[own] = order(places[own])
        rows: list[int] = found.tolist()
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The cursor, the same on all ranks: {digests, weights, rows, seed, position}."""
        return {
            "digests": [source.digest for source in self.sources],
            "weights": self._mixture.counts.tolist(),
            "rows": [source.num_rows for source in self.sources],
            "seed": self._seed,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken; the number of ranks and the global
        batch may be others.

        Args:
            state: Of `state_dict`.

        Raises:
            CorpusError: It is of another order.
        """
        own = self.state_dict()
        fixes = {
            "digests": "the same token files in data.paths",
            "weights": "the same data.weights",
            "rows": "the same model.sequence_length, data.packing and data.validation_fraction",
            "seed": "the same train.seed",
        }
        for key, fix in fixes.items():
            if key not in state:
                raise CorpusError(
                    'the data was not of data.kind "tokens", and can\'t continue where it was; set '
                    "[data] as it was, or give this run another name"
                )
            if list(np.atleast_1d(state[key])) != list(np.atleast_1d(own[key])):
                raise CorpusError(
                    f"the data was at {key} {state[key]}, but is now at {key} {own[key]}: it can't "
                    f"continue where it was; use {fix}"
                )
        self.position = int(state["position"])


def _in_order(parts: list[dict[str, Tensor]], places: list[np.ndarray]) -> dict[str, Tensor]:
    """Rows of several sources, each at its place of the batch. By numpy: torch would wake threads,
    which the step needs, where this runs beside it."""
    count = sum(len(each) for each in places)
    found: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        own = first.numpy()
        whole = np.empty((count, *own.shape[1:]), dtype=own.dtype)
        for part, place in zip(parts, places, strict=True):
            whole[place] = part[name].numpy()
        found[name] = torch.from_numpy(whole)
    return found


def held_out_places(sources: Sequence[TokenSource], *, num_rows: int) -> list[tuple[int, int]]:
    """At most `num_rows` rows that are held out, as many of each source, spread over its own.

    Args:
        sources: The data sets.
        num_rows: At most so many.

    Returns:
        The number of the source and of its row, of each.
    """
    chosen: list[tuple[int, int]] = []
    for i, source in enumerate(sources):
        held = len(source.rows) - source.num_rows
        count = min(held, num_rows // len(sources) + (i < num_rows % len(sources)))
        chosen += [(i, source.num_rows + j * held // count) for j in range(count)]
    return chosen


def held_out_rows(
    sources: Sequence[TokenSource], *, num_rows: int, rank: int = 0, num_ranks: int = 1
) -> dict[str, Tensor]:
    """This rank's share of the rows of `held_out_places`.

    Args:
        sources: The data sets.
        num_rows: At most so many, over all ranks.
        rank: This rank.
        num_ranks: The number of ranks that share them.

    Returns:
        As the sources' `batch` has them; on some ranks there may be none.
    """
    own = held_out_places(sources, num_rows=num_rows)[rank::num_ranks]
    parts = [
        source.rows.batch([row for of, row in own if of == i]) for i, source in enumerate(sources)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
