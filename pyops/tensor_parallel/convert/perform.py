"""What a blueprint says is done to a model, in place, and listed in a report. Communicates
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from pyops.flat import Placement
from pyops.tensor_parallel.convert.blueprint import Blueprint
from pyops.tensor_parallel.convert.head_counts import set_heads
from pyops.tensor_parallel.convert.module_swap import swapped
from pyops.tensor_parallel.convert.multihead import MultiheadAttention
from pyops.tensor_parallel.convert.region_hooks import Enter, JoinTokens, SplitTokens

__all__ = ["Report", "perform"]


@dataclass
class Report:
    """What `parallelize` did; as text, with the modules of all layers in one line."""

    cut: dict[str, str] = field(default_factory=dict)
    """{module: kind} of the modules that were replaced."""
    changed: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """{module: {attribute: (before, after)}} of numbers of heads that were set."""
    replicated: list[str] = field(default_factory=list)
    """Names of the parameters that are whole on every rank."""
    elements: tuple[int, int] = (0, 0)
    """Number of elements of the model's parameters before, and on this rank afterwards."""
    checked: str = ""
    """What the check found equal, or why nothing was checked."""

    def __str__(self) -> str:
        lines = [
            f"{self.elements[0]:,} parameters, of which {self.elements[1]:,} on this rank",
            f"checked: {self.checked}",
        ]
        cut = [f"{name}: {kind}" for name, kind in self.cut.items()]
        changed = [
            f"{name}: {', '.join(f'{k} {a} -> {b}' for k, (a, b) in each.items())}"
            for name, each in self.changed.items()
        ]
        for title, entries in (
            ("cut", cut),
            ("changed", changed),
            ("whole on every rank", self.replicated),
        ):
            times: dict[str, int] = {}
            for entry in entries:
                name, _, rest = entry.partition(":")
                each = ".".join("*" if part.isdigit() else part for part in name.split(".")) + (
                    ":" + rest if rest else ""
                )
                times[each] = times.get(each, 0) + 1
            lines += (
                [
                    title,
                    *(f"    {each}" + (f"  ({n})" if n > 1 else "") for each, n in times.items()),
                ]
                if times
                else []
            )
        return "\n".join(lines)


@torch.no_grad()
def perform(model: nn.Module, blueprint: Blueprint) -> Report:
    """Swap modules, set heads, put hooks at the edges. What fails leaves the model half done: see
    module_snapshot.py."""
    report = Report(cut={name: cut.kind for name, cut in blueprint.cuts.items()})
    elements = sum(p.numel() for p in model.parameters())
    whole = {name: blueprint.whole(name) for name in blueprint.modules}
    report.replicated = [
        ".".join(filter(None, (name, key)))
        for name, _ in model.named_modules()
        for key in whole[name]
    ]
    kept = [
        p for p in model.parameters() if id(p) in blueprint.tied
    ]  # so that no other gets their ids
    _swap(model, blueprint)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and (new := blueprint.tied.get(id(p))) is not None:
                module.register_parameter(key, new)
    del kept
    _place_partial(blueprint, whole)
    for name, heads in blueprint.heads.items():
        if name in blueprint.multihead:
            continue
        module, configured = (
            model.get_submodule(name),
            blueprint.kinds[name] == "configured attention",
        )
        if changed := set_heads(module, heads, configured=configured):
            report.changed[name] = changed
    for name in blueprint.regions if blueprint.ranks.size > 1 else ():
        tokens, flat = blueprint.shared_out(name), blueprint.kinds[name] == "mlp"
        hook = Enter(blueprint.ranks, tokens, flat=flat, heads=blueprint.heads.get(name))
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    for name, tokens in blueprint.blocks.items():
        blocks = list(model.get_submodule(name).children())
        blocks[0].register_forward_pre_hook(SplitTokens(tokens), with_kwargs=True)
        blocks[-1].register_forward_hook(JoinTokens(tokens))
    report.elements = elements, sum(p.numel() for p in model.parameters())
    return report


def _swap(model: nn.Module, blueprint: Blueprint) -> None:
    """Each module that is cut, under all names that it has."""
    done: dict[int, nn.Module] = {}
    kept = []  # so that no new module gets the id of an old one
    for name in [*blueprint.cuts, *blueprint.multihead]:
        old = blueprint.modules[name]
        if id(old) not in done:
            if name in blueprint.cuts:
                done[id(old)] = swapped(old, blueprint.cuts[name], blueprint.tied)
            else:
                assert isinstance(old, nn.MultiheadAttention)
                done[id(old)] = MultiheadAttention(
                    old,
                    blueprint.heads[name],
                    ranks=blueprint.ranks,
                    sequence_parallel=blueprint.shared_out(name) is not None,
                )
        kept.append(old)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, done[id(old)])
    for module in model.modules():
        if hasattr(
            module, "use_nested_tensor"
        ):  # torch.nn.TransformerEncoder, which then goes past its layers
            module.use_nested_tensor = False  # type: ignore[assignment]


def _place_partial(blueprint: Blueprint, whole: Mapping[str, list[str]]) -> None:
    """Say of which whole parameters each rank has only a part of the gradient."""
    rank, ranks = blueprint.ranks.rank, blueprint.ranks.size
    for name, module in blueprint.modules.items():
        parts = blueprint.kinds.get(name) == "partial" or blueprint.shared_out(name) is not None
        if whole[name] and parts:
            module.placements = {
                key: Placement.whole(
                    module.get_parameter(key).shape, rank=rank, ranks=ranks, partial=True
                )
                for key in whole[name]
            }
