"""One rank's values on every rank: how replicas begin alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.failure import naming_lost_ranks
from pyops.mesh import ProcessGroupLike, resolve

__all__ = ["broadcast"]


@torch.no_grad()
def broadcast(
    tensors: Iterable[Tensor], *, group: ProcessGroupLike = None, source: int = 0
) -> None:
    """Give each of the tensors, in place, the values that it has on one rank of the group.
    Collective: every rank must call it.

    Args:
        tensors: of the same shapes and dtypes, in the same order, on every rank.
        group: the ranks; see `pyops.mesh.resolve`. One process keeps its own values.
        source: the rank within the group whose values are taken.

    Raises:
        CommunicationError: a rank is lost; the error names it.
    """
    ranks = resolve(group, "broadcast")
    if ranks is None or ranks.size() == 1:
        return
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        with naming_lost_ranks(f"the broadcast of rank {source}'s values", group=ranks):
            dist.broadcast(whole, group=ranks, group_src=source)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
