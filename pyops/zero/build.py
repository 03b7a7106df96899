"""Every parameter gets its memory: in buffers that are whole on every rank, or in units of which
each rank keeps a chunk.

    stage 0, 1, 2   one buffer for each dtype and device
    stage 3         one for each unit, dtype and device, trained or frozen; and one for what is too
                    small to be cut

Units are laid out one after the other, so that of a model on the meta device only one has memory at
a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from pyops.comm.agreement import ranks_agree
from pyops.comm.broadcast import broadcast
from pyops.comm.buckets.reduce_axes import OwnRanks
from pyops.comm.collectives.communicator import Communicator
from pyops.mesh import ProcessGroupLike, resolve
from pyops.zero.hooks.sharded_unit import ShardedUnit
from pyops.zero.layout.materialize import (
    Initialize,
    adopt,
    initialize_modules,
    is_out_of_memory,
    materialize_buffers,
    on_meta,
)
from pyops.zero.layout.parameter_file import ParameterFile, open_file, region_bytes
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.partition import Partition
from pyops.zero.layout.sharded import ShardedParameters
from pyops.zero.layout.units import IsUnit, UnitPlan, find_units

__all__ = ["Layout", "lay_out_units", "lay_out_whole", "put_together"]

Named = list[tuple[str, nn.Parameter]]
Flat = TypeVar("Flat", bound=FlatParameters)


@dataclass
class Layout:
    """flats: of trained parameters, those of units among them. units: of stage 3. positions[f][i]:
    when backward is expected to reach parameter i of flats[f], as a rank among all."""

    flats: list[FlatParameters] = field(default_factory=list)
    units: list[ShardedUnit] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)

    def _number(self, model: nn.Module) -> None:
        order = {
            id(p): i for i, p in enumerate(reversed(list(model.parameters())))
        }  # backward reaches the last one first
        self.positions = [[order[id(p)] for p in flat.parameters] for flat in self.flats]


@dataclass(frozen=True)
class ShardSpec:
    """How a model's parameters are laid out over the ranks."""

    rank: int
    """Of this process among those that share states; 0 at stage 0."""

    ranks: int
    """How many share states; 1 at stage 0."""

    device: torch.device
    """Where parameters on the meta device get their memory."""

    group: ProcessGroupLike
    """All data-parallel ranks, which begin with the values of the first."""

    initialize: Initialize | None
    """See ZeroConfig.initialize."""

    bucket_bytes: int
    """See ZeroConfig.bucket_bytes."""

    trained: frozenset[int]
    """Ids of the parameters that are stepped."""

    folder: str | None = None
    """Where parameters of stage 3 are kept between their uses; None: in memory."""

    apart: Mapping[int, str] = field(default_factory=dict)
    """Why a parameter gets a buffer beside that of others, by its id: the ranks of other pipeline
    stages own the same parts of it, or other ranks hold it."""

    own: Mapping[int, OwnRanks] = field(default_factory=dict)
    """The ranks that hold a parameter, by its id, where these are not all of `group`."""

    def place(self, parameter: nn.Parameter) -> tuple[int, int]:
        """This process among the ranks that share the states of a parameter, and how many these
        are."""
        if self.ranks == 1 or id(parameter) not in self.own:
            return self.rank, self.ranks
        over = self.own[id(parameter)].communicator
        return (0, 1) if over is None else (over.rank, over.size)

    def flat_parameters(self, named: Named, kind: type[Flat], *, label: str = "") -> Flat:
        """A buffer that is whole on every rank, of parameters of one dtype and device that the
        same ranks hold.

        Args:
            kind: Of the buffer.
            label: See there.
        """
        first = named[0][1]
        rank, ranks = self.place(first)
        made = kind(
            named,
            rank=rank,
            ranks=ranks,
            bucket_bytes=None if issubclass(kind, ShardedParameters) else self.bucket_bytes,
            device=self.device,
            label=label,
        )
        made.own = self.own.get(id(first))
        return made

    def broadcast(self, flats: Iterable[FlatParameters], others: Iterable[Tensor] = ()) -> None:
        """Give buffers, and other tensors, the values that they have on the first of the ranks
        that hold them. Collective."""
        if resolve(self.group, "ZeroOptimizer") is None:
            return
        pairs = [(flat.data, flat.own) for flat in flats]
        for tensor, own in (*pairs, *((each, self.own.get(id(each))) for each in others)):
            broadcast([tensor], group=self.group if own is None else own.group)


@contextmanager
def _on_all_ranks(shards: ShardSpec, name: str, parameters: Iterable[Tensor]) -> Iterator[None]:
    """A part of the model gets memory and values on all ranks, or none goes on: the next thing that
    they do together is to send its values."""
    numel = {id(p): p.numel() * p.element_size() for p in parameters}
    with ranks_agree(shards.group):
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                f"ZeroOptimizer: there is no memory on {shards.device} for {name}, whose "
                f"parameters take {sum(numel.values()):,} bytes while they are laid out; use more "
                "ranks of another axis (tp, pp), 16 bits, or stage 3 with smaller units"
            ) from error


def _by_kind(named: Named, shards: ShardSpec) -> list[Named]:
    """Parameters of one dtype and device together, in the order in which backward reaches them."""
    kinds: dict[tuple[torch.dtype, torch.device, str], Named] = {}
    for name, p in reversed(named):
        key = (
            p.dtype,
            shards.device if p.is_meta else p.device,
            shards.apart.get(id(p), ""),
        )
        kinds.setdefault(key, []).append((name, p))
    return list(kinds.values())


def _alone(tensors: Sequence[nn.Parameter], device: torch.device) -> None:
    """Memory for parameters on meta that are in no buffer."""
    for p in tensors:
        if p.is_meta:
            adopt(p, torch.empty_like(p, device=device, requires_grad=False))


def lay_out_whole(model: nn.Module, shards: ShardSpec) -> Layout:
    """The buffers of stages 0 to 2."""
    fresh = [m for m in model.modules() if on_meta(m)]
    layout = Layout()
    rest = [p for p in model.parameters() if id(p) not in shards.trained]
    with _on_all_ranks(shards, "the model", model.parameters()):
        for named in _by_kind(
            [(n, p) for n, p in model.named_parameters() if id(p) in shards.trained], shards
        ):
            layout.flats.append(shards.flat_parameters(named, FlatParameters))
        _alone(rest, shards.device)
        for module in fresh:
            materialize_buffers(module, shards.device)
        initialize_modules(fresh, shards.initialize)
    shards.broadcast(layout.flats, (*rest, *model.buffers()))
    layout._number(model)
    return layout


def _sharded(plan: UnitPlan, shards: ShardSpec) -> ShardedUnit:
    flats = [
        shards.flat_parameters(list(reversed(named)), ShardedParameters, label=plan.name)
        for named in plan.parameters.values()
    ]
    return ShardedUnit(plan.name, plan.module, is_root=plan.is_root, flats=flats)


def _scatter(unit: ShardedUnit, shards: ShardSpec, file: ParameterFile | None) -> None:
    for flat in unit.flats:
        shards.broadcast([flat])
        flat.scatter(file)


def put_together(units: Sequence[ShardedUnit], ranks: ProcessGroupLike) -> None:
    """Whole parameters again, in memory of their own, for a model that can't be laid out. A
    collective of the ranks that share it out."""
    group = resolve(ranks, "ZeroOptimizer")
    communicator = None if group is None or group.size() == 1 else Communicator.of(group)
    for flat in (flat for unit in units for flat in unit.flats):
        if not flat.is_whole:
            flat.start_gather(communicator, async_op=False).wait()
        for parameter in flat.parameters:
            parameter.data = parameter.data.clone()


def _file(plans: Sequence[UnitPlan], shards: ShardSpec) -> ParameterFile | None:
    """A file with room for this rank's shards of all units."""
    if shards.folder is None:
        return None
    total = 0
    for plan in plans:
        for (dtype, *_), named in plan.parameters.items():
            tensors = [(name, p.shape) for name, p in reversed(named)]
            _, ranks = shards.place(named[0][1])
            numel = Partition.plan(
                tensors, ranks=ranks, item_size=dtype.itemsize, bucket_bytes=None
            ).layout.numel
            total += region_bytes(numel // ranks * dtype.itemsize)
    return open_file(shards.folder, nbytes=total, group=shards.group)


def lay_out_units(
    model: nn.Module,
    shards: ShardSpec,
    *,
    units: IsUnit | Sequence[nn.Module] | None,
    whole_below: int,
) -> Layout:
    """The units and buffers of stage 3.

    Args:
        units, whole_below: See ZeroConfig.
    """
    trained = shards.trained
    plans, whole = find_units(
        model,
        units,
        trained=trained,
        whole_below=whole_below,
        device=shards.device,
        apart=shards.apart,
    )
    file = _file(plans, shards)
    fresh = {id(m) for m in model.modules() if on_meta(m)}
    layout = Layout()
    for named in _by_kind([(n, p) for n, p in whole if id(p) in trained], shards):
        layout.flats.append(shards.flat_parameters(named, FlatParameters))
    rest = [p for _, p in whole if id(p) not in trained]
    _alone(rest, shards.device)
    inside = {id(m) for plan in plans[1:] for m in plan.module.modules()}
    for plan in plans:
        modules = [
            m
            for m in plan.module.modules()
            if id(m) in fresh and (not plan.is_root or id(m) not in inside)
        ]
        own = (p for named in plan.parameters.values() for _, p in named)
        try:
            with _on_all_ranks(shards, plan.name, own):
                unit = _sharded(plan, shards)
                for module in modules:
                    materialize_buffers(module, shards.device)
                initialize_modules(modules, shards.initialize)
        except BaseException:
            put_together(layout.units, shards.group)
            raise
        layout.units.append(unit)
        if (
            not unit.is_root
        ):  # what units share with one another is the root's, and they may fill it
            _scatter(unit, shards, file)
        layout.flats += [flat for flat in unit.flats if id(flat.parameters[0]) in trained]
    _scatter(layout.units[0], shards, file)
    small = [flat for flat in layout.flats if not isinstance(flat, ShardedParameters)]
    shards.broadcast(small, (*rest, *model.buffers()))
    layout._number(model)
    return layout
