"""Every parameter gets its place: in buffers that are whole on every rank, or in units of which
each rank keeps a chunk.

    stage 0, 1, 2    one buffer for each dtype and device
    stage 3          one for each unit, dtype and device, trained or frozen; and one for what is too small to be cut

Units are laid out one after the other, so that of a model on the meta device only one has memory at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.broadcast import broadcast
from pyops.zero.hooks.unshard_hooks import ShardedUnit
from pyops.zero.layout.materialise import (
    Initialise,
    adopt,
    initialise_modules,
    materialise_buffers,
    on_meta,
)
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.partition import Partition
from pyops.zero.layout.sharded import ShardedParameters
from pyops.zero.layout.stored import ParameterFile, open_file, region_bytes
from pyops.zero.layout.units import IsUnit, UnitPlan, find_units

__all__ = ["Layout", "lay_out_units", "lay_out_whole"]

Named = list[tuple[str, nn.Parameter]]


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
class Place:
    """Where and among whom a layout is made. folder: where stage 3's parameters are between their
    uses; None: in memory. apart: ids of parameters that lie in buffers of their own, in which the
    ranks of another model own the same parts of them."""

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None
    initialise: Initialise | None
    folder: str | None = None
    apart: frozenset[int] = frozenset()


def _by_kind(named: Named, place: Place) -> list[Named]:
    """Parameters of one dtype and device together, in the order in which backward reaches them."""
    kinds: dict[tuple[torch.dtype, torch.device, str], Named] = {}
    for name, p in reversed(named):
        key = (
            p.dtype,
            place.device if p.is_meta else p.device,
            name if id(p) in place.apart else "",
        )
        kinds.setdefault(key, []).append((name, p))
    return list(kinds.values())


def _alone(tensors: Sequence[nn.Parameter], device: torch.device) -> None:
    """Memory for parameters on meta that are in no buffer."""
    for p in tensors:
        if p.is_meta:
            adopt(p, torch.empty_like(p, device=device, requires_grad=False))


def lay_out_whole(
    model: nn.Module, *, trained: set[int], bucket_bytes: int, place: Place
) -> Layout:
    """Stages 0 to 2. trained: ids of the parameters that are stepped."""
    fresh = [m for m in model.modules() if on_meta(m)]
    layout = Layout()
    for named in _by_kind([(n, p) for n, p in model.named_parameters() if id(p) in trained], place):
        layout.flats.append(
            FlatParameters(
                named,
                rank=place.rank,
                ranks=place.ranks,
                bucket_bytes=bucket_bytes,
                device=place.device,
            )
        )
    rest = [p for p in model.parameters() if id(p) not in trained]
    _alone(rest, place.device)
    for module in fresh:
        materialise_buffers(module, place.device)
    initialise_modules(fresh, place.initialise)
    broadcast([*(flat.data for flat in layout.flats), *rest, *model.buffers()], group=place.group)
    layout._number(model)
    return layout


def _sharded(plan: UnitPlan, place: Place) -> ShardedUnit:
    flats = [
        ShardedParameters(
            list(reversed(named)),
            rank=place.rank,
            ranks=place.ranks,
            bucket_bytes=None,
            device=place.device,
            label=plan.name,
        )
        for named in plan.parameters.values()
    ]
    return ShardedUnit(plan.name, plan.module, is_root=plan.is_root, flats=flats)


def _scatter(unit: ShardedUnit, place: Place, file: ParameterFile | None) -> None:
    for flat in unit.flats:
        broadcast([flat.data], group=place.group)
        flat.scatter(file)


def _file(plans: Sequence[UnitPlan], place: Place) -> ParameterFile | None:
    """A file with room for this rank's shards of all units."""
    if place.folder is None:
        return None
    total = 0
    for plan in plans:
        for (dtype, *_), named in plan.parameters.items():
            tensors = [(name, p.shape) for name, p in reversed(named)]
            numel = Partition.plan(
                tensors, ranks=place.ranks, item_size=dtype.itemsize, bucket_bytes=None
            ).layout.numel
            total += region_bytes(numel // place.ranks * dtype.itemsize)
    return open_file(place.folder, nbytes=total, group=place.group)


def lay_out_units(
    model: nn.Module,
    *,
    trained: set[int],
    bucket_bytes: int,
    place: Place,
    wanted: IsUnit | Sequence[nn.Module] | None,
    whole_below: int,
) -> Layout:
    """Stage 3. wanted, whole_below: see `find_units`."""
    plans, whole = find_units(
        model, wanted=wanted, trained=trained, whole_below=whole_below, device=place.device
    )
    file = _file(plans, place)
    fresh = {id(m) for m in model.modules() if on_meta(m)}
    layout = Layout()
    for named in _by_kind([(n, p) for n, p in whole if id(p) in trained], place):
        layout.flats.append(
            FlatParameters(
                named,
                rank=place.rank,
                ranks=place.ranks,
                bucket_bytes=bucket_bytes,
                device=place.device,
            )
        )
    rest = [p for _, p in whole if id(p) not in trained]
    _alone(rest, place.device)
    inside = {id(m) for plan in plans[1:] for m in plan.module.modules()}
    for plan in plans:
        unit = _sharded(plan, place)
        modules = [
            m
            for m in plan.module.modules()
            if id(m) in fresh and (not plan.is_root or id(m) not in inside)
        ]
        for module in modules:
            materialise_buffers(module, place.device)
        initialise_modules(modules, place.initialise)
        layout.units.append(unit)
        if (
            not unit.is_root
        ):  # what units share with one another is the root's, and they may fill it
            _scatter(unit, place, file)
        layout.flats += [flat for flat in unit.flats if id(flat.parameters[0]) in trained]
    _scatter(layout.units[0], place, file)
    small: list[Tensor] = [
        flat.data for flat in layout.flats if not isinstance(flat, ShardedParameters)
    ]
    broadcast([*small, *rest, *model.buffers()], group=place.group)
    layout._number(model)
    return layout
