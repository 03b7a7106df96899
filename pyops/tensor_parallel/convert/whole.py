"""The way back from `parallelize`: the state_dict that the model would have had, put together from
the ranks' parts.

rank 0  [3, 2 heads, D] --.                              GPT-2's c_attn before:  [D, 3 * 4 heads]
rank 1  [3, 2 heads, D] --+--> [3, 4 heads, D]  -->  [3 * 4 heads, D]  -->  its transpose
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.flat import Placement
from pyops.tensor_parallel.convert.module_swap import laid_back
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["whole_state_dict"]


@torch.no_grad()
def whole_state_dict(model: nn.Module, *, group: RanksLike = None) -> dict[str, Tensor]:
    """The state_dict of the model as it was before `parallelize(model, group=group)`, with today's
    values. Collective: every rank of the group must call it.

    One all_gather for each parameter that is cut. Parameters must have memory: at stage 3 of ZeRO
    call it within `optimizer.whole_parameters()`.

    Args:
        model: as `parallelize` left it.
        group: the group that was given to `parallelize`.

    Returns:
        On every rank, tensors with the names, shapes and order of the uncut model, which can load
        them, and save them in its own format. Parameters that several modules share are one tensor.
    """
    ranks = Ranks.of(group)
    holders: dict[int, tuple[nn.Module, Placement]] = {}
    for module in model.modules():
        for name, place in getattr(module, "placements", {}).items():
            holders.setdefault(id(module.get_parameter(name)), (module, place))
    done: dict[int, Tensor] = {}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in holders and id(value) not in done:
            done[id(value)] = _whole(value, *holders[id(value)], ranks)
        found[name] = done.get(id(value), value.detach())
    return found


def _whole(local: Tensor, module: nn.Module, place: Placement, ranks: Ranks) -> Tensor:
    if not place.cuts:
        return local.detach()
    parts = ranks.gather(local.detach().contiguous()).wait().chunk(ranks.size)
    places = gather(place, group=ranks.group) if len(place.cuts) > 1 else None
    whole = place.joined(parts, places)
    return laid_back(module, whole).contiguous()
