"""Which parameters are gathered together: the units of a model, by default the children of its
lists of blocks.

model.embedding   |                           |
model.blocks      | block 0 | block 1 | ...   |    each a unit
model.norm        |                           |
                    the rest, and what blocks share with anybody, is the root unit: whole from
                    forward to backward's end
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

__all__ = ["IsUnit", "UnitPlan", "find_units"]

IsUnit = Callable[[str, nn.Module], bool]


@dataclass
class UnitPlan:
    """A unit: its module, and its own parameters by dtype, device and whether they are trained, in
    order of registration. What other ranks hold than the rest goes by the reason as well, so that
    it lies apart."""

    name: str
    module: nn.Module
    is_root: bool
    parameters: dict[
        tuple[torch.dtype, torch.device, bool, str], list[tuple[str, nn.Parameter]]
    ] = field(default_factory=dict)


def _unit_modules(
    model: nn.Module, wanted: IsUnit | Sequence[nn.Module] | None
) -> list[tuple[str, nn.Module]]:
    """The outermost modules that are units, in order of registration."""
    chosen: IsUnit
    if wanted is None:
        containers = (nn.ModuleList, nn.Sequential)
        children = {
            id(child)
            for m in model.modules()
            if isinstance(m, containers)
            for child in m.children()
        }

        def chosen(_: str, module: nn.Module) -> bool:
            return id(module) in children
    elif callable(wanted):
        chosen = wanted
    else:
        listed = {id(module) for module in wanted}

        def chosen(_: str, module: nn.Module) -> bool:
            return id(module) in listed

    found: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if not isinstance(child, nn.ModuleList | nn.ModuleDict) and chosen(path, child):
                if any(True for _ in child.parameters()) and all(
                    child is not other for _, other in found
                ):
                    found.append((path, child))
            else:
                visit(path, child)

    visit("", model)
    return found


def find_units(
    model: nn.Module,
    wanted: IsUnit | Sequence[nn.Module] | None,
    *,
    trained: Collection[int],
    whole_below: int,
    device: torch.device,
    apart: Mapping[int, str] = MappingProxyType({}),
) -> tuple[list[UnitPlan], list[tuple[str, nn.Parameter]]]:
    """(units, the root first and the others in order of registration; (name, parameter) of those
    that stay whole).

    Args:
        wanted: (path, module) -> whether it is a unit, or the modules themselves; units don't lie
            within units.
        trained: Ids of parameters that are stepped.
        whole_below: Parameters of fewer elements stay whole.
        device: Of parameters on meta.
        apart: Why a parameter does not lie beside others, by its id: those of one reason lie
            together.
    """
    root = UnitPlan("the model's own", model, True)
    units = [UnitPlan(path, module, False) for path, module in _unit_modules(model, wanted)]
    owners: dict[int, set[int]] = {}
    for number, unit in enumerate(units):
        for p in unit.module.parameters():
            owners.setdefault(id(p), set()).add(number)
    inside = {id(m) for unit in units for m in unit.module.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for p in module.parameters(recurse=False):
                owners.setdefault(id(p), set()).add(-1)
    whole: list[tuple[str, nn.Parameter]] = []
    for name, p in model.named_parameters():
        if p.numel() < whole_below:
            whole.append((name, p))
            continue
        of = owners[id(p)]
        unit = units[next(iter(of))] if len(of) == 1 and -1 not in of else root
        place = device if p.is_meta else p.device
        key = (p.dtype, place, id(p) in trained, apart.get(id(p), ""))
        unit.parameters.setdefault(key, []).append((name, p))
    return [root, *units], whole
