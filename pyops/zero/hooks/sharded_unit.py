"""ShardedUnit: one unit of sharded parameters while the program runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pyops.comm.collectives.work import Work
from pyops.torch_private import storage_address
from pyops.zero.layout.sharded import ShardedParameters

__all__ = ["ShardedUnit"]


class ShardedUnit:
    """One unit while the program runs.

    Args:
        flats: Its parameters. whole: gathered, or on its way, while there are works. there:
            gathered, and in sight. open: the module whose forward is running. calls: forwards whose
            backward is still to come. wide: its parameters are used outside of its forward, so they
            stay until the end of backward, as the root's do.
    """

    def __init__(
        self, name: str, module: nn.Module, *, is_root: bool, flats: Sequence[ShardedParameters]
    ) -> None:
        self.name, self.module, self.is_root, self.flats = name, module, is_root, list(flats)
        self.works: list[Work] = []
        self.whole = self.there = self.wide = False
        self.open: nn.Module | None = None
        self.calls = 0

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those that have no memory but while they are used."""
        for flat in self.flats:
            if flat.is_spread:
                yield from flat.parameters

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of the gathered memory."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return False
        storage = storage_address(tensor)
        return any(storage_address(flat.data) == storage for flat in self.flats)
