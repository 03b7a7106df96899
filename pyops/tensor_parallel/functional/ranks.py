"""The ranks that share a layer: a process group, this rank's place in it, and the few collectives
that layers call.

A group of None is one rank alone: nothing is communicated, and nothing needs torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather, all_reduce, reduce_scatter
from pyops.comm.collectives.work import Work
from pyops.mesh import check_initialized

__all__ = ["Ranks", "pad_rows"]


@dataclass(frozen=True)
class Ranks:
    """`rank` of `size` ranks of `group`; of one rank without a group. Use `Ranks.of`."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """ValueError where `group` is not a process group that this rank is in, or None and the
        ranks were never joined.

        A virtual group is ranks already.
        """
        if group is None:
            check_initialized("a layer or function of pyops.tensor_parallel")
            return cls(None, 0, 1)
        if isinstance(group, Ranks):
            return group
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                "group must be a process group that this rank is in, or None for one "
                f"rank alone; got {group!r}"
            )
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of a layer talks to the same ranks

    @property
    def communicator(self) -> Communicator:
        return Communicator.of(self.group)

    def sum_(self, x: Tensor, *, async_op: bool = False) -> Work:
        """x becomes the ranks' sum, in place."""
        if self.size == 1:
            return Work(x)
        found = all_reduce(x, group=self.group, async_op=async_op)
        return found if async_op else Work(found)

    def gather(self, x: Tensor, *, async_op: bool = False) -> Work:
        """[n, ...] -> [ranks * n, ...]."""
        if self.size == 1:
            return Work(x)
        found = all_gather(x, group=self.group, async_op=async_op)
        return found if async_op else Work(found)

    def reduce_scatter(self, x: Tensor, *, async_op: bool = False) -> Work:
        """[ranks * n, ...] -> this rank's [n, ...] of the ranks' sum. x is left as it is."""
        if self.size == 1:
            return Work(x)
        found = reduce_scatter(x, group=self.group, async_op=async_op)
        return found if async_op else Work(found)

    def rows_each(self, rows: int) -> int:
        """Rows of a tensor that each rank holds when `rows` are shared out: the last ranks' are
        padded."""
        return -(-rows // self.size)

    def start(self, rows: int) -> int:
        """Where this rank's rows of `rows` begin, padding counted."""
        return self.rank * self.rows_each(rows)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with zero rows behind it up to `rows`."""
    if len(x) == rows:
        return x
    shape: Sequence[int] = [0, 0] * (x.dim() - 1) + [0, rows - len(x)]
    return nn.functional.pad(x, shape)
