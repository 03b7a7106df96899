"""What a replacements says is done to a model, in place, and listed in a report. Communicates
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from pyops.flat import Placement
from pyops.tensor_parallel.convert.head_counts import set_heads
from pyops.tensor_parallel.convert.module_swap import swapped
from pyops.tensor_parallel.convert.multihead import MultiheadAttention
from pyops.tensor_parallel.convert.region_hooks import Enter, JoinTokens, SplitTokens
from pyops.tensor_parallel.convert.replacement_plan import ReplacementPlan

__all__ = ["Report", "replace_layers"]


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
def replace_layers(model: nn.Module, replacements: ReplacementPlan) -> Report:
    """Swap modules, set heads, put hooks at the edges. What fails leaves the model half done: see
    module_snapshot.py."""
    report = Report(cut={name: cut.kind for name, cut in replacements.cuts.items()})
    elements = sum(p.numel() for p in model.parameters())
    whole = {name: replacements.whole(name) for name in replacements.modules}
    report.replicated = [
        ".".join(filter(None, (name, key)))
        for name, _ in model.named_modules()
        for key in whole[name]
    ]
    kept = [
        p for p in model.parameters() if id(p) in replacements.tied
    ]  # so that no other gets their ids
    _swap(model, replacements)
    _share(model, replacements)
    del kept
    _place_partial(replacements, whole)
    for name, heads in replacements.heads.items():
        if name in replacements.multihead:
            continue
        module, configured = (
            model.get_submodule(name),
            replacements.kinds[name] == "configured attention",
        )
        if changed := set_heads(module, heads, configured=configured):
            report.changed[name] = changed
    for name in replacements.regions if replacements.ranks.size > 1 else ():
        tokens, flat = replacements.shared_out(name), replacements.kinds[name] == "mlp"
        hook = Enter(replacements.ranks, tokens, flat=flat, heads=replacements.heads.get(name))
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    for name, tokens in replacements.blocks.items():
        blocks = list(model.get_submodule(name).children())
        blocks[0].register_forward_pre_hook(SplitTokens(tokens), with_kwargs=True)
        blocks[-1].register_forward_hook(JoinTokens(tokens))
    report.elements = elements, sum(p.numel() for p in model.parameters())
    return report


def _share(model: nn.Module, replacements: ReplacementPlan) -> None:
    """Give the parameters that are cut now to the other modules that have them, such as BERT's
    predictions the bias of their decoder, with the placements."""
    places = {
        id(module.get_parameter(key)): place
        for module in model.modules()
        for key, place in getattr(module, "placements", {}).items()
    }
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is None or (new := replacements.tied.get(id(p))) is None:
                continue
            module.register_parameter(key, new)
            kept = getattr(module, "placements", {})
            module.placements = {**kept, key: places[id(new)]}  # type: ignore[assignment]


def _swap(model: nn.Module, replacements: ReplacementPlan) -> None:
    """Each module that is cut, under all names that it has."""
    done: dict[int, nn.Module] = {}
    kept = []  # so that no new module gets the id of an old one
    for name in [*replacements.cuts, *replacements.multihead]:
        old = replacements.modules[name]
        if id(old) not in done:
            if name in replacements.cuts:
                done[id(old)] = swapped(old, replacements.cuts[name], replacements.tied)
            else:
                assert isinstance(old, nn.MultiheadAttention)
                done[id(old)] = MultiheadAttention(
                    old,
                    replacements.heads[name],
                    ranks=replacements.ranks,
                    sequence_parallel=replacements.shared_out(name) is not None,
                )
        kept.append(old)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, done[id(old)])
    for module in model.modules():
        if hasattr(
            module, "use_nested_tensor"
        ):  # torch.nn.TransformerEncoder, which then goes past its layers
            module.use_nested_tensor = False  # type: ignore[assignment]


def _place_partial(replacements: ReplacementPlan, whole: Mapping[str, list[str]]) -> None:
    """Say of which whole parameters each rank has only a part of the gradient."""
    rank, ranks = replacements.ranks.rank, replacements.ranks.size
    for name, module in replacements.modules.items():
        parts = (
            replacements.kinds.get(name) == "partial" or replacements.shared_out(name) is not None
        )
        if whole[name] and parts:
            module.placements = {
                key: Placement.whole(
                    module.get_parameter(key).shape, rank=rank, ranks=ranks, partial=True
                )
                for key in whole[name]
            }
