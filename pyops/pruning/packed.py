"""Masks in checkpoints: whole, packed, by name, for any layout.

A mask is saved and not derived from zeros: a weight may be 0 and alive. An eighth of a byte for
each weight of the whole model, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather, ranks_agree
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.flat import Placement
from pyops.mesh import ProcessGroupLike, resolve
from pyops.pruning.masks import Mask, Masks, layout_hash, pack_bits, unpack_bits, whole_shape

__all__ = ["masks_from_state", "masks_state"]


def masks_state(masks: Masks, *, group: ProcessGroupLike = None) -> dict[str, Any]:
    """The masks of the whole model, for `pyops.checkpoint.save`. Collective: every rank must call
    it.

    Args:
        masks: Of this rank's part.
        group: The ranks that have the model together; see `pyops.mesh.resolve`.

    Returns:
        {"layout": hash of names and shapes, "shapes": {name: [...]}, "bits": {name: uint8}},
        the same on every rank.
    """
    ranks = resolve(group, "masks_state")
    many = ranks is not None and ranks.size() > 1
    communicator = Communicator.of(group) if many else None
    placements = Placement.of(masks.model)
    own = {
        name: (whole_shape(masks, name), placements[name].box if name in placements else None)
        for name in masks
    }
    everyone = gather(own, group=group)
    first: dict[Any, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, held in enumerate(everyone):
        for name, (shape, box) in held.items():
            first.setdefault((name, box), rank)
            shapes.setdefault(name, shape)
    rank = 0 if communicator is None else communicator.rank
    device = next(masks.model.parameters()).device
    bits: dict[str, Tensor] = {}
    for name in sorted(shapes):
        whole = torch.zeros(shapes[name], dtype=torch.uint8, device=device)
        if name in own and first[name, own[name][1]] == rank:
            alive = masks[name].alive().to(device)
            place = placements.get(name)
            if place is None:
                whole.copy_(alive)
            else:
                place.part_of_whole(whole).copy_(place.part(alive))
        if communicator is not None:
            all_reduce(whole, communicator=communicator, op="sum", label=f"mask of {name}")
        bits[name] = pack_bits(whole.bool()).cpu()
    return {
        "layout": layout_hash(shapes),
        "shapes": {name: list(shapes[name]) for name in sorted(shapes)},
        "bits": bits,
    }


def masks_from_state(
    model: nn.Module, state: Mapping[str, Any], *, group: ProcessGroupLike = None
) -> dict[str, Mask]:
    """This rank's part of saved masks: for `Masks(model, ...)`, or `update` of those there are.

    Args:
        model: This rank's part of it, of any layout.
        state: What `masks_state` gave.
        group: The ranks that have the model together; see `pyops.mesh.resolve`.

    Raises:
        ValueError: On every rank alike: the masks are of other names or shapes than the model has.
    """
    resolve(group, "masks_from_state")
    with ranks_agree(group):
        bits, shapes = state["bits"], {n: tuple(s) for n, s in state["shapes"].items()}
        if layout_hash(shapes) != state["layout"]:
            raise ValueError(
                f"the masks are damaged: their shapes hash to {layout_hash(shapes)}, the state "
                f"says {state['layout']}; load another checkpoint"
            )
        placements = Placement.of(model)
        found: dict[str, Mask] = {}
        for name, parameter in model.named_parameters():
            if name not in bits:
                continue
            place = placements.get(name)
            whole_of = tuple(parameter.shape) if place is None else tuple(place.global_shape)
            if whole_of != shapes[name]:
                raise ValueError(
                    f"the mask of {name} is of {shapes[name]}, the parameter of {whole_of}; the "
                    "masks are of another model"
                )
            whole = unpack_bits(torch.as_tensor(bits[name]), prod(whole_of)).view(whole_of)
            found[name] = Mask.of(whole if place is None else place.take(whole))
    missing = set(shapes).difference(*gather(set(found), group=group))
    if missing:
        raise ValueError(
            f"the masks have {min(missing)} ({len(missing)} such names), which the model has not; "
            "they are of another model"
        )
    return found
