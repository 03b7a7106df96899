"""What a quantized linear layer is apart from its numbers, and where its codes and scales stand in
those of the whole weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import naming_lost_ranks
from pyops.flat import Placement
from pyops.quantized.formats import Codes
from pyops.tensor_parallel import Ranks

__all__ = ["LinearShape", "code_placements", "largest_over_ranks"]


def largest_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The largest of the ranks' numbers, place by place; nan where a rank has nan. Collective.

    Args:
        x: fp32, none below 0.
        ranks: Who has a part.
    """
    if ranks.size == 1:
        return x
    # The bits of numbers from 0 on are in the order of the numbers, and nan stands above all
    bits = x.abs().contiguous().view(torch.int32).clone()
    with naming_lost_ranks("the largest magnitude over ranks", group=ranks.process_group):
        dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=ranks.process_group)
    return bits.view(torch.float32)


@dataclass(frozen=True)
class LinearShape:
    """What a linear layer is, apart from its numbers."""

    in_features: int
    """Width of x over all ranks."""
    out_features: int
    """Width of y over all ranks; of several stacked matrices that of one."""
    ranks: Ranks
    """Who share the layer."""
    cut: str = "whole"
    """"column", "row", or "whole" where every rank, or the only one, has all of it."""
    sequence_parallel: bool = False
    """Whether tokens are cut over the ranks outside of the layer."""
    skip_bias: bool = False
    """Whether y comes without the bias, and beside it."""
    moves: bool = False
    """Whether a column layer gathers its y, a row layer cuts its x."""


def code_placements(
    weight: Placement, codes: Codes, columns: int, grouped: bool
) -> dict[str, Placement]:
    """Where codes and scales of this rank stand in those of the whole weight.

    Args:
        weight: Where the weight of this rank stands.
        codes: Of the weight of this rank.
        columns: Elements of a row of the tensor that holds the codes.
        grouped: Whether a row has scales for groups of it.
    """
    width = codes.codes.shape[-1]
    places = {"codes": _scaled_last(weight, columns, width)}
    groups = codes.scales.shape[-1] if grouped else 0
    if grouped:
        scales = _scaled_last(weight, groups, width)
    else:
        last = len(weight.global_shape) - 1
        kept = tuple(cut for cut in weight.cuts if cut.dim != last)
        first = weight.first and (weight.index == 0 or len(kept) == len(weight.cuts))
        scales = replace(weight, global_shape=weight.global_shape[:-1], cuts=kept, first=first)
    places["scales"] = scales
    if codes.zero_points is not None:
        places["zero_points"] = scales
    return places


def _scaled_last(place: Placement, count: int, width: int) -> Placement:
    """A placement of `count` elements in the last dimension for `width` of the weight's."""
    last = len(place.global_shape) - 1

    def scaled(n: int) -> int:
        return -(-n * count // width)

    cuts = tuple(
        replace(cut, start=scaled(cut.start), stop=scaled(cut.stop), length=scaled(cut.length))
        if cut.dim == last
        else cut
        for cut in place.cuts
    )
    shape = (*place.global_shape[:-1], scaled(place.global_shape[-1]))
    return replace(place, global_shape=shape, cuts=cuts)
