"""A state that lies in a store, in one or several tiles, and is read when it is asked for.

parameter   | elements 0 .. 2 Mi         | 2 Mi .. 3 Mi |
places      tile 4, from byte 0          tile 5, from byte 16 Mi        of exp_avg, say
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.offload.stores import Store
from pyops.offload.tiles import Field

__all__ = ["Later", "Place"]


class Place(NamedTuple):
    """Elements [start, stop) of the flattened parameter are the field of this tile."""

    tile: int
    field: Field
    start: int
    stop: int


class Later:
    """A tensor of `shape` in a store; a `pyops.flat.TensorElsewhere`."""

    def __init__(self, store: Store, shape: torch.Size, places: Sequence[Place]) -> None:
        self.shape, self.dtype = shape, places[0].field.dtype
        self._store, self._places = store, places

    def read(self) -> Tensor:
        """The state as it is now, in new memory."""
        whole = torch.empty(self.shape.numel(), dtype=self.dtype, device="cpu")
        for tile, field, start, stop in self._places:
            self._store.read(tile, field.start, whole[start:stop])
        return whole.view(self.shape)
