"""RowOrder: which rows each step has, a function of (seed, epoch), the same on every rank.

epoch e:   permutation of the rows, keyed by (seed, e)
           | global batch 0 | global batch 1 | ... | what fills no batch is left out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyops import random
from pyops.data.corpus import CorpusError

__all__ = ["RowOrder", "check_share"]


def check_share(*, rank: int, num_ranks: int, global_batch: int) -> None:
    """Refuse a batch that the ranks can't share.

    Args:
        rank: This rank.
        num_ranks: The number of ranks that share a batch.
        global_batch: Sequences in a step, over all ranks.

    Raises:
        ValueError: When there is no such rank, or the ranks do not divide the global batch.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(
            f"rank is {rank} of {num_ranks} ranks; it must be 0 or more and less than {num_ranks}"
        )
    if global_batch < 1 or global_batch % num_ranks:
        raise ValueError(
            f"a global batch of {global_batch} sequences can't be shared by {num_ranks} ranks; "
            f"make it a multiple of {num_ranks}"
        )


class RowOrder:
    """Endless global batches of the numbers 0 to num_rows - 1.

    Args:
        num_rows: How many rows there are; at least one global batch.
        global_batch: Rows in a step, over all ranks.
        seed: Of the order in each epoch.

    Attributes:
        epoch: Of the batch that was given last.
        position: How many rows of the epoch were given.
    """

    def __init__(self, num_rows: int, *, global_batch: int, seed: int) -> None:
        self.num_rows, self.global_batch, self.seed = num_rows, global_batch, seed
        self.epoch, self.position = 0, 0
        self._order = self._permutation()

    def _permutation(self) -> Tensor:
        keys = random.uniform(self.seed, f"data.epoch.{self.epoch}", (self.num_rows,))
        return torch.argsort(keys, stable=True)

    def next(self) -> list[int]:
        """The rows of the next global batch."""
        if self.position + self.global_batch > self.num_rows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        rows: list[int] = self._order[self.position : self.position + self.global_batch].tolist()
        self.position += self.global_batch
        return rows

    def resume(
        self, state: Mapping[str, Any], *, own: Mapping[str, Any], fixes: Mapping[str, str]
    ) -> None:
        """Continue behind the batch after which `state` was taken.

        Args:
            state: A cursor that was saved, with "epoch" and "position".
            own: The cursor of what is read now.
            fixes: {entry that must be the same in both: what makes it so}.

        Raises:
            CorpusError: An entry differs, or is not there.
        """
        for key, fix in fixes.items():
            if key not in state:
                raise CorpusError(
                    f"the data was of another data.kind, whose cursor has no {key}: it can't "
                    "continue where it was; set [data] as it was, or give this run another name"
                )
            if state[key] != own[key]:
                raise CorpusError(
                    f"the data was at {key} {state[key]}, but is now at {key} {own[key]}: it can't "
                    f"continue where it was; use {fix}"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()
