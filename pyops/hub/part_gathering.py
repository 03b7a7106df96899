"""gather_parts: a parameter that the ranks of a group share, whole on the first of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import gather, naming_lost_ranks
from pyops.flat import Placement
from pyops.tensor_parallel import Ranks

__all__ = ["gather_parts"]


def gather_parts(local: Tensor, place: Placement | None, ranks: Ranks) -> Tensor | None:
    """The whole parameter on rank 0, None on others. Collective where it is cut; a parameter that
    all ranks hold whole is not sent.

    Args:
        local: This rank's part.
        place: Where it stands in the whole one; None: it is whole.
        ranks: That share the parameter.

    Raises:
        CommunicationError: A rank is lost; the error names it.
    """
    if ranks.size == 1 or place is None or not place.cuts:
        return local if ranks.rank == 0 else None
    places = gather(place, group=ranks.group) if len(place.cuts) > 1 else None
    raw = local.contiguous().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(ranks.size)] if ranks.rank == 0 else None
    with naming_lost_ranks("the gathering of parameters for a save", group=ranks.process_group):
        dist.gather(raw, parts, group=ranks.process_group, group_dst=0)
    if parts is None:
        return None
    tensors = [part.view(local.dtype) for part in parts]
    del raw, parts
    return place.joined(tensors, places)
