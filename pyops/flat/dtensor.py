"""DTensor: what this rank holds of a tensor that a mesh of ranks shares, and sums over the ranks
that share it.

    mesh (replica 2, shard 2), placements (Replicate, Shard(0))   dims = (1,): the shards of one
                                                                  replica make the whole
        rank 0  rows 0 1      rank 2  rows 0 1                    a sum over them counts every
                                                                  element once
        rank 1  rows 2        rank 3  rows 2

Nothing here imports torch.distributed before there is a DTensor: a plain tensor costs one look into
`sys.modules`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyops.torch_private import local_shape_and_offset, local_tensor

__all__ = [
    "Spread",
    "check_placements",
    "first_element",
    "is_dtensor",
    "local_of",
    "placed_alike",
    "placed_as",
    "spread_of",
]


def is_dtensor(tensor: object) -> bool:
    """Whether it is a torch.distributed.tensor.DTensor, which nobody can have made before that
    module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, the memory itself and ready to be read; any other tensor
    as it is."""
    if not is_dtensor(tensor):
        return tensor
    local: Any = local_tensor(tensor)  # to_local() makes it a Parameter of a Parameter
    return local.wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]


def placed_alike(one: Any, other: Any) -> bool:
    """Whether both are DTensors that lie on one mesh in one way, or neither is a DTensor."""
    if not (is_dtensor(one) and is_dtensor(other)):
        return not is_dtensor(one) and not is_dtensor(other)
    return bool(
        one.device_mesh == other.device_mesh and tuple(one.placements) == tuple(other.placements)
    )


def placed_as(tensor: Any, like: Any) -> Tensor:
    """What this rank holds of `tensor` once it lies as `like` does: a collective where it does not
    yet."""
    if placed_alike(tensor, like):
        return local_of(tensor)
    from pyops.failure import naming_lost_ranks

    mesh = like.device_mesh
    group = mesh.get_group() if mesh.ndim == 1 else None
    with naming_lost_ranks("the redistribution of a DTensor", group=group):
        return local_of(tensor.redistribute(like.device_mesh, like.placements))


@dataclass(frozen=True)
class Spread:
    """The dimensions of a mesh over which the parts of a tensor are spread; over its others they
    are repeated."""

    mesh: Any
    dims: tuple[int, ...]

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by its sum over the ranks that hold the other parts; all of them call
        it."""
        from torch import distributed as dist

        from pyops.failure import naming_lost_ranks

        there = tensor.to(
            self.mesh.device_type
        )  # of offloaded parameters the sums lie on the host, which NCCL cannot reach
        for dim in self.dims:
            group = self.mesh.get_group(dim)
            with naming_lost_ranks("the sum over the ranks of a DTensor", group=group):
                dist.all_reduce(there, group=group)
        return tensor if there is tensor else tensor.copy_(there)


def spread_of(tensor: Any) -> Spread | None:
    """Over which dimensions of its mesh a DTensor is cut; None for one that every rank has whole,
    and for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    dims = tuple(
        i for i, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(i) > 1
    )
    return Spread(mesh, dims) if dims else None


def first_element(tensor: Any) -> int | None:
    """The number of the first element that this rank holds of the flattened whole, of which it
    holds a run; None where its elements are no run (cut along another dimension than the first, or
    in strides) and for one that is not contiguous."""
    from torch.distributed.tensor import Shard

    cut = [
        p
        for i, p in enumerate(tensor.placements)
        if not p.is_replicate() and tensor.device_mesh.size(i) > 1
    ]
    local = local_of(tensor)
    if any(type(p) is not Shard or p.dim != 0 for p in cut) or not local.is_contiguous():
        return None
    if not cut or local.numel() == 0:
        return 0
    _, offset = local_shape_and_offset(tensor)
    return int(offset[0]) * int(prod(tensor.shape[1:]))


def check_placements(tensor: Any, *, name: str, who: str) -> None:
    """ValueError or TypeError for a DTensor of which a rank has no elements that it could step by
    itself."""
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(
                f"{who}: {name} is a DTensor placed {tuple(tensor.placements)}, of which "
                "each rank has a summand; make it "
                "Shard or Replicate: parameter.redistribute(placements=...)"
            )
    kind = type(local_of(tensor))
    if kind not in (Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{who}: {name} is a DTensor of {kind.__name__}s, whose memory the kernels "
            "can't walk; use torch's own"
        )
