"""A rank's part of a tensor, and the tensor as the uncut model has it.

in the files, Conv1D      whole, as laid out         rank 0            rank 1
[D, 3 * 4 heads]     ->   [3, 4 heads, D]       ->   [3, 2 heads, D]   [3, 2 heads, D]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement, Shard, Shards
from pyops.hub.part_gathering import gather_parts
from pyops.ops.memory import resolved_view
from pyops.tensor_parallel import Ranks
from pyops.tensor_parallel.convert.module_swap import laid_back, laid_out

__all__ = ["RelaidTensor", "copy_part", "gathered", "placement_of", "whole_shape"]


class RelaidTensor:
    """A tensor on disk, as another layout of the model has it; read when it is asked for, as the
    tensors of `pyops.checkpoint.load(folder, lazy=True)` are.

    Args:
        read: Gives it, whole and laid out.
        shape: Its own.
        dtype: Its own.
    """

    def __init__(
        self, read: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._read, self.shape, self.dtype = read, shape, dtype

    def read(self) -> Tensor:
        """The whole tensor."""
        return self._read()

    def compare(self, target: Any = None) -> None:
        """Read the tensor, for what can't be read must be known before anything is filled."""
        self.read()

    def read_into(self, target: Tensor | Shard | Shards) -> None:
        """Fill a tensor, or the parts of it that shards are.

        Args:
            target: Of this tensor's shape; floating dtypes are converted.
        """
        whole = self.read()
        for part in target if isinstance(target, Shards) else (target,):
            if not isinstance(part, Shard):
                part.copy_(whole)
            elif part.is_range:
                start = part.offset[0]
                part.tensor.copy_(whole.reshape(-1)[start : start + part.tensor.numel()])
            else:
                box = zip(part.offset, part.tensor.shape, strict=True)
                part.tensor.copy_(whole[tuple(slice(o, o + n) for o, n in box)])


def placement_of(module: nn.Module, key: str) -> Placement | None:
    """Where the module's own parameter stands in the whole one; None: it is whole.

    Args:
        module: The module.
        key: The name of the parameter in it.
    """
    found: Placement | None = getattr(module, "placements", {}).get(key)
    return found


def whole_shape(module: nn.Module, key: str, tensor: Tensor) -> tuple[int, ...]:
    """The shape that the tensor has in the uncut model.

    Args:
        module: The module that holds it.
        key: Its name there.
        tensor: The tensor as it is on this rank.
    """
    place = placement_of(module, key)
    if place is None:
        return tuple(tensor.shape)
    shape = place.global_shape
    if getattr(module, "stacked", None):
        shape = (shape[0] * shape[1], *shape[2:])
    return shape[::-1] if getattr(module, "transposed", None) and len(shape) == 2 else shape


def copy_part(module: nn.Module, key: str, tensor: Tensor, whole: Tensor) -> None:
    """Fill the tensor with this rank's part; padding becomes zero. Makes no copy of its own.

    Args:
        module: The module that holds the tensor.
        key: Its name there.
        tensor: What is filled.
        whole: The tensor as the uncut model has it, of any dtype.
    """
    place = placement_of(module, key)
    if place is None:
        tensor.copy_(whole)
        return
    found = place.part_of_whole(laid_out(module, whole, place))
    part = place.part(tensor)
    if part.numel() < tensor.numel():
        tensor.zero_()
    part.copy_(found)


def gathered(module: nn.Module, key: str, tensor: Tensor, ranks: Ranks) -> Tensor | None:
    """The tensor as the uncut model has it, on the first rank; None on the others. Collective where
    it is cut.

    Args:
        module: The module that holds the tensor.
        key: Its name there.
        tensor: This rank's part.
        ranks: That share the layer.
    """
    place = placement_of(module, key)
    whole = gather_parts(resolved_view(tensor.detach()), place, ranks)
    return whole if whole is None or place is None else laid_back(module, whole)
