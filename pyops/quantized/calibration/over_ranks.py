"""What several ranks have seen, put together: sums, and the least and the greatest."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.failure import naming_lost_ranks
from pyops.tensor_parallel import Ranks

__all__ = ["gathered", "greatest", "least", "summed"]


def _reduced(x: Tensor, ranks: Ranks, op: dist.ReduceOp.RedOpType) -> Tensor:
    if ranks.size == 1:
        return x
    found = x.detach().clone().contiguous()
    with naming_lost_ranks("calibrating", group=ranks.process_group):
        dist.all_reduce(found, op=op, group=ranks.process_group)
    return found


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks, the same bits on each of them."""
    return _reduced(x, ranks, dist.ReduceOp.SUM)


def greatest(x: Tensor, ranks: Ranks) -> Tensor:
    """Element by element the greatest of the ranks'; nan where one of them is nan."""
    if ranks.size == 1:
        return x
    bad = _reduced(x.isnan().float(), ranks, dist.ReduceOp.MAX)
    most = _reduced(x.nan_to_num(-torch.inf, torch.inf, -torch.inf), ranks, dist.ReduceOp.MAX)
    return torch.where(bad > 0, torch.nan, most)


def least(x: Tensor, ranks: Ranks) -> Tensor:
    """Element by element the least of the ranks'; nan where one of them is nan."""
    return -greatest(-x, ranks)


def gathered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """The ranks' tensors of one shape behind one another along a dimension."""
    if ranks.size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
    with naming_lost_ranks("calibrating", group=ranks.process_group):
        dist.all_gather(parts, x.contiguous(), group=ranks.process_group)
    return torch.cat(parts, dim)
