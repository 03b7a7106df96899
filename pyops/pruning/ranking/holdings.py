"""What each rank holds of the parameters that are pruned, and which rank counts it.

    rank 0   blocks.0.weight  rows 0 to 511 (tp 0), elements 0 .. 99 of these (ZeRO 3, rank 0)
    rank 1   blocks.0.weight  rows 0 to 511 (tp 0), elements 100 ..           (ZeRO 3, rank 1)
    rank 2   blocks.0.weight  rows 512 ..   (tp 1)                            and so on

Every rank says what it has; of what several have alike (replicas of data parallelism, copies of
tensor parallelism, a parameter that stages of a pipeline share) the first one counts. So nothing
here asks which strategy a model is under.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather, ranks_agree
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.flat import Placement
from pyops.mesh import ProcessGroupLike, resolve
from pyops.pruning.ranking.choice import Candidate, candidates_of, choose
from pyops.zero import ZeroOptimizer

__all__ = ["Holding", "Holdings"]

Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int]  # name, box, range within it


@dataclass(frozen=True, eq=False)
class Holding:
    """What this rank has of one parameter: elements [start, stop) of its flattened tensor.

    Attributes:
        name: Of the parameter.
        parameter: The model's.
        values: The elements, a flat view of the memory that they are in.
        start: The first of them in this rank's flattened tensor.
        placement: Where this rank's tensor stands in the whole one; None: it is whole.
        counted: Whether this rank counts them.
    """

    name: str
    parameter: nn.Parameter
    values: Tensor
    start: int
    placement: Placement | None
    counted: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's tensor, also where it has no memory."""
        return tuple(self.parameter.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.local_shape if self.placement is None else tuple(self.placement.global_shape)

    @property
    def key(self) -> Key:
        """What it is of the whole, alike for copies."""
        box = ((0,) * len(self.shape), self.shape)
        offset, size = box if self.placement is None else self.placement.box
        return self.name, tuple(offset), tuple(size), self.start, self.start + self.values.numel()

    @cached_property
    def inside(self) -> Tensor | None:
        """int64: places among `values` that are no padding; None where all are."""
        if self.placement is None or self.placement.size == self.placement.local_shape:
            return None
        places = torch.arange(self.values.numel(), device=self.values.device)
        fine = torch.ones(places.shape, dtype=torch.bool, device=places.device)
        at = self._coordinates(places)
        for cut in self.placement.cuts:
            fine &= at[cut.dim] < cut.stop - cut.start
        return fine.nonzero().view(-1)

    def index(self, places: Tensor) -> Tensor:
        """int64: where elements stand in the flattened whole tensor.

        Args:
            places: int64, among `values`.
        """
        if self.placement is None:
            return places + self.start
        found = torch.zeros_like(places)
        at = self._coordinates(places)
        for size, offset, coordinate in zip(self.shape, self.placement.offset, at, strict=True):
            found = found * size + coordinate + offset
        return found

    def _coordinates(self, places: Tensor) -> list[Tensor]:
        rest, found = places + self.start, []
        for size in reversed(self.local_shape):
            found.append(rest % size)
            rest = rest // size
        return found[::-1]


class Holdings(Sequence[Holding]):
    """This rank's holdings of the parameters that are pruned, and what all ranks know of them.

    Args:
        model: This rank's part of it.
        only: See `pyops.pruning.magnitude`.
        optimizer: A ZeroOptimizer over the model; at stage 3 it has the weights.
        group: The ranks that have the model together.

    Attributes:
        shapes: {name: whole shape} of all ranks' chosen parameters, in the order of the names.

    Raises:
        ValueError, TypeError: On every rank alike: what is asked for is not there, or the group
            does not hold the parameters whole.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        only: Sequence[str] | None,
        optimizer: object = None,
        group: ProcessGroupLike = None,
    ) -> None:
        ranks = resolve(group, "pruning")
        self.model, self.group = model, group
        many = ranks is not None and ranks.size() > 1
        self.communicator = Communicator.of(group) if many else None
        self.zero = optimizer if isinstance(optimizer, ZeroOptimizer) else None
        with ranks_agree(group):
            own = candidates_of(model)
        union: dict[str, Candidate] = {}
        for of_rank in gather(own, group=group):
            for each in of_rank:
                union.setdefault(each.name, each)
        chosen = choose(list(union.values()), only)  # alike on every rank, and so are its errors
        with ranks_agree(group):
            held = sorted(self._held(chosen), key=lambda each: each.name)
        everyone = gather([each.key for each in held], group=group)
        first: dict[Key, int] = {}
        for rank, keys in enumerate(everyone):
            for key in keys:
                first.setdefault(key, rank)
        self.shapes = {name: union[name].shape for name in sorted(chosen)}
        self._check_whole(first)
        rank = 0 if self.communicator is None else self.communicator.rank
        self._held_here = [
            Holding(
                each.name,
                each.parameter,
                each.values,
                each.start,
                each.placement,
                first[each.key] == rank,
            )
            for each in held
        ]
        sizes = [prod(shape) for shape in self.shapes.values()]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.first = dict(zip(self.shapes, starts, strict=True))
        self.device = held[0].values.device if held else next(model.parameters()).device

    def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
        return self._held_here[index]

    def __len__(self) -> int:
        return len(self._held_here)

    def numel(self, name: str) -> int:
        """Elements of the whole parameter."""
        return prod(self.shapes[name])

    def of(self, names: Sequence[str]) -> list[Holding]:
        """This rank's holdings of these parameters."""
        wanted = set(names)
        return [each for each in self._held_here if each.name in wanted]

    @property
    def reduce(self) -> Callable[[Tensor], object] | None:
        """Sums a tensor over the ranks, in place; None where there are no others."""
        if self.communicator is None:
            return None
        return lambda counts: all_reduce(
            counts, communicator=self.communicator, op="sum", label="counts of magnitudes"
        )

    def total(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Sums over the ranks of a whole number for each parameter.

        Args:
            numbers: This rank's, by name; 0 where there is none.
        """
        own = [numbers.get(name, 0) for name in self.shapes]
        counts = torch.tensor(own, dtype=torch.int64, device=self.device)
        if self.reduce is not None:
            self.reduce(counts)
        return dict(zip(self.shapes, counts.tolist(), strict=True))

    def local_masks(self, alive: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """bool tensors of the shape of this rank's parameters.

        Args:
            alive: bool, flat, of each holding's `values`. At ZeRO's stage 3 the other ranks' parts
                are brought here: a collective.
        """
        return {each.name: self._local(each, alive[each.name]) for each in self._held_here}

    def _local(self, each: Holding, alive: Tensor) -> Tensor:
        if not self._spread:
            return alive.view(each.local_shape)
        assert self.zero is not None
        whole = alive.new_zeros(prod(each.local_shape), dtype=torch.uint8)
        whole[each.start : each.start + alive.numel()] = alive
        if self.zero.communicator is not None:
            all_reduce(
                whole, communicator=self.zero.communicator, op="sum", label=f"mask of {each.name}"
            )
        return whole.bool().view(each.local_shape)

    @property
    def _spread(self) -> bool:
        return self.zero is not None and self.zero.stage == 3

    def _held(self, chosen: Collection[str]) -> Iterator[Holding]:
        placements = Placement.of(self.model)
        named = dict(self.model.named_parameters())
        if self.zero is not None and self._spread:
            names = {id(p): name for name, p in named.items()}
            for flat in self.zero.flats:
                if getattr(flat, "region", None) is not None:
                    raise ValueError(
                        f"{flat.names[0]} is in a file (offload), where pruning can't rank it; "
                        "prune the model before it is given to ZeroOptimizer"
                    )
                for piece in flat.partition.pieces(flat.rank):
                    parameter = flat.parameters[piece.index]
                    name = names[id(parameter)]
                    values, start = flat.piece(piece), piece.of_tensor.start
                    if name in chosen:
                        yield Holding(name, parameter, values, start, placements.get(name))
            return
        for name in chosen:
            if name not in named:
                continue
            parameter = named[name]
            if parameter.numel() and not parameter.untyped_storage().nbytes():
                raise ValueError(
                    f"{name} is spread over the ranks (ZeRO, stage 3); give optimizer= the "
                    "ZeroOptimizer, which has its part of the weights"
                )
            values = parameter.detach()
            if not values.is_contiguous():
                raise ValueError(
                    f"{name} has strides {values.stride()}; make it contiguous before pruning"
                )
            yield Holding(name, parameter, values.view(-1), 0, placements.get(name))

    def _check_whole(self, keys: Mapping[Key, int]) -> None:
        held = dict.fromkeys(self.shapes, 0)
        for name, _, size, start, stop in keys:
            held[name] += min(stop - start, prod(size))  # what is beyond the box is padding
        for name, count in held.items():
            if count < self.numel(name):
                raise ValueError(
                    f"the ranks of the group hold {count} of {self.numel(name)} elements of "
                    f"{name}; give the group of all ranks that have the model together "
                    "(None: all ranks)"
                )
