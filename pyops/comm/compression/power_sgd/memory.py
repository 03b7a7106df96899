"""What PowerSGD keeps from one step to the next: errors, and the directions of each matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.power_sgd.low_rank import (
    Family,
    families,
    fresh_basis,
    pieces,
    whole_batches,
)
from pyops.comm.compression.power_sgd.matrix_codec import MatrixCodec
from pyops.flat import FlatLayout, Shard

__all__ = ["PowerSGDMemory"]


class PowerSGDMemory:
    """What PowerSGD keeps from one step to the next for the tensors of `layout`, one rank of
    `size`.

    worker: this rank's error, fp32 [layout.numel]; zero where tensors travel exactly. bases: Q of
    each family of matrices, [members, r, m], the same bits on all ranks. overflowed: fp32 [1], 1
    once a sum was not finite.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        codec: MatrixCodec,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.numel, self.codec, self.rank, self.size = (
            layout,
            layout.numel,
            codec,
            rank,
            size,
        )
        self.families, self.whole = families(layout, rank=codec.rank)
        self.batches = [whole_batches(layout, family) for family in self.families]
        self.pieces = [
            [piece for batch in batches for piece in pieces(batch)] for batches in self.batches
        ]
        self.scratch = max(
            (p.numel for cut in self.pieces for p in cut if p.family.rank > 1), default=0
        )
        self._cuts, self._exact = _cuts([layout.slice_at(i) for i in self.whole], layout.numel)
        self.worker = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.overflowed = torch.zeros(1, dtype=torch.float32, device=device)
        self.bases = [self._fresh(family) for family in self.families]
        self.rounds = 0
        self.starts = [0] * (
            size + 1
        )  # no rank keeps errors for all, as the owners of an elementwise codec's chunks do
        self.server = self.worker[:0]

    def _fresh(self, family: Family) -> Tensor:
        return fresh_basis(family, self.layout.names, seed=self.codec.seed).to(self.worker.device)

    def zero_(self) -> None:
        """Forget the errors and the directions."""
        self.worker.zero_()
        self.bases = [self._fresh(family) for family in self.families]

    def state_dict(self) -> dict[str, Any]:
        """{"codec", "rounds", "worker": {name: Shard of [size, *shape]}, "basis": {name: Q [r,
        m]}}."""
        worker = {
            name: Shard(
                (self.size, *shape), (self.rank, *(0 for _ in shape)), self._part(i).view(1, *shape)
            )
            for i, (name, shape) in enumerate(
                zip(self.layout.names, self.layout.shapes, strict=True)
            )
        }
        basis = {
            self.layout.names[i]: q
            for family, batch in zip(self.families, self.bases, strict=True)
            for i, q in zip(family.members, batch, strict=True)
        }
        return {"codec": self.codec.name, "rounds": self.rounds, "worker": worker, "basis": basis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or the whole tensors that a checkpoint has in place of
        shards.

        From another number of ranks every rank gets the mean of the errors.

        Raises:
            ValueError: Before anything is changed, for another codec, other tensors, or rows of
                another number of ranks of which some are missing.
        """
        errors = ErrorFeedback(
            self.layout, codec=self.codec, rank=self.rank, size=self.size, device=self.worker.device
        )
        errors.load_state_dict(
            {
                **state,
                "server": {name: self.worker.new_zeros(numel) for name, numel in self._sizes()},
            }
        )
        bases = [
            torch.stack([self._basis(state, i, family) for i in family.members])
            for family in self.families
        ]
        self.worker.copy_(errors.worker)
        self.bases, self.rounds = [b.to(self.worker.device) for b in bases], errors.rounds

    def _sizes(self) -> list[tuple[str, int]]:
        return [
            (name, prod(shape))
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
        ]

    def _basis(self, state: Mapping[str, Any], index: int, family: Family) -> Tensor:
        name = self.layout.names[index]
        found = state.get("basis", {}).get(name)
        if not isinstance(found, Tensor) or found.shape != (family.rank, family.columns):
            has = tuple(found.shape) if isinstance(found, Tensor) else "none"
            raise ValueError(
                f"the state's directions for {name!r} are {has}; expected "
                f"({family.rank}, {family.columns})"
            )
        return found

    def take_basis(self, name: str, other: PowerSGDMemory) -> None:
        """Copy a matrix's directions from another memory of it."""
        where, source = self._place(name), other._place(name)
        if where is not None and source is not None:
            self.bases[where[0]][where[1]] = other.bases[source[0]][source[1]]

    def _place(self, name: str) -> tuple[int, int] | None:
        index = self.layout.names.index(name)
        return next(
            (
                (i, f.members.index(index))
                for i, f in enumerate(self.families)
                if index in f.members
            ),
            None,
        )

    def _part(self, index: int) -> Tensor:
        return self.worker[self.layout.slice_at(index)]

    def exact_parts(self, flat: Tensor) -> list[Tensor]:
        """Views of what travels as it is; tensors that lie side by side are one."""
        parts = flat.split_with_sizes(self._cuts) if self._exact else []
        return [parts[i] for i in self._exact]


def _cuts(places: Sequence[slice], numel: int) -> tuple[list[int], list[int]]:
    """(lengths that cut `numel` elements at the ends of the places, numbers of the cuts that are
    places)"""
    spans: list[list[int]] = []
    for place in sorted((p.start, p.stop) for p in places if p.stop > p.start):
        if spans and spans[-1][1] == place[0]:
            spans[-1][1] = place[1]
        else:
            spans.append(list(place))
    lengths, wanted, at = [], [], 0
    for start, stop in spans:
        if start > at:
            lengths.append(start - at)
        wanted.append(len(lengths))
        lengths.append(stop - start)
        at = stop
    return [*lengths, *([numel - at] if numel > at else [])], wanted
