"""The ranks that share a layer: a process group, this rank's place in it, and the few collectives
that layers call.

    Ranks.of(None)               the default process group, or one rank where there is none
    Ranks.of(pyops.mesh.ALONE)   this rank alone, whatever runs beside it: nothing is communicated
    Ranks.of(mesh)               the tensor-parallel group of a pyops.mesh.Mesh
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather, all_reduce, reduce_scatter
from pyops.comm.collectives.work import Work
from pyops.mesh import ALONE, Alone, Mesh, ProcessGroupLike, resolve

__all__ = ["Ranks", "RanksLike", "pad_rows"]

RanksLike: TypeAlias = Union[ProcessGroupLike, Mesh, "Ranks"]
"""What a parameter `group` of a tensor-parallel layer or function takes: a process group that this
rank is in; a Mesh, for its tp group; None for the default process group, or one rank where
torch.distributed is not initialized; `pyops.mesh.ALONE` for this rank alone; Ranks as they are."""


@dataclass(frozen=True)
class Ranks:
    """`rank` of `size` ranks of `group`. Make one by `Ranks.of`."""

    group: dist.ProcessGroup | Alone
    """The process group; ALONE for one rank, so that it can be passed on as it is."""
    rank: int
    """This rank's number within the group."""
    size: int
    """How many ranks the group has."""

    @classmethod
    def of(cls, group: RanksLike) -> Ranks:
        """The ranks that an argument `group` means, see `RanksLike`.

        Raises:
            TypeError: `group` is something else, or no process group that this rank is in.
            ValueError: `group` is None, and this process was started as one rank of several that
                have not called init_process_group.
        """
        if isinstance(group, Ranks):
            return group
        if isinstance(group, Mesh):
            group = group.group("tp") or ALONE
        found = resolve(group, "a layer or function of pyops.tensor_parallel")
        if found is None:
            return cls(ALONE, 0, 1)
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of a layer communicates with the same ranks

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group as torch has it; only for more than one rank."""
        assert isinstance(self.group, dist.ProcessGroup)
        return self.group

    @property
    def communicator(self) -> Communicator:
        """What collectives of the group need; only for more than one rank."""
        return Communicator.of(self.process_group)

    def sum_(self, x: Tensor, *, async_op: bool = False) -> Work:
        """x becomes the ranks' sum, in place."""
        if self.size == 1:
            return Work(x)
        found = all_reduce(x, group=self.process_group, async_op=async_op)
        return found if async_op else Work(found)

    def gather(self, x: Tensor, *, async_op: bool = False) -> Work:
        """[n, ...] -> [ranks * n, ...]."""
        if self.size == 1:
            return Work(x)
        found = all_gather(x, group=self.process_group, async_op=async_op)
        return found if async_op else Work(found)

    def reduce_scatter(self, x: Tensor, *, async_op: bool = False) -> Work:
        """[ranks * n, ...] -> this rank's [n, ...] of the ranks' sum. x is left as it is."""
        if self.size == 1:
            return Work(x)
        found = reduce_scatter(x, group=self.process_group, async_op=async_op)
        return found if async_op else Work(found)

    def rows_per_rank(self, rows: int) -> int:
        """Rows of a tensor that each rank holds when `rows` are shared out: the last ranks' are
        padded."""
        return -(-rows // self.size)

    def start(self, rows: int) -> int:
        """Where this rank's rows of `rows` begin, padding counted."""
        return self.rank * self.rows_per_rank(rows)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with zero rows behind it up to `rows`."""
    if len(x) == rows:
        return x
    shape: Sequence[int] = [0, 0] * (x.dim() - 1) + [0, rows - len(x)]
    return nn.functional.pad(x, shape)
