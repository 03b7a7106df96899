"""Rank 0's values on every rank: how replicas begin alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.failure import naming_lost_ranks

__all__ = ["broadcast"]


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Give each of the tensors, in place, the values that it has on rank 0 of the group; nothing
    where a rank is alone.

    A collective: every rank gives tensors of the same shapes and dtypes in the same order.
    CommunicationError, which names it, for a rank that is lost.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        with naming_lost_ranks("the broadcast of rank 0's values", group=group):
            dist.broadcast(whole, group=group, group_src=0)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
