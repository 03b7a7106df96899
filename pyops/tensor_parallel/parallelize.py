"""parallelize: an existing transformer, its layers swapped in place for those that the ranks of a group share.

    model = transformers.GPT2LMHeadModel(config)                        the same on every rank
    report = parallelize(model, group=tp_group)                         by the plan for its class
    report = parallelize(model, group=tp_group, plan={"attn": "attention", "attn.[qkv]": "columns", "attn.out": "rows",
                                                      "ffn.0": "columns", "ffn.2": "rows"})

    GPT2Attention                       rank 0          rank 1
      Enter      x           -->        x               x               backward: one sum of dx
      c_attn     q k v       -->        heads 0 1       heads 2 3
      c_proj     rows        -->        heads 0 1  sum  heads 2 3

The modules' own code runs on, with fewer heads. Plans are data, in plans.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.comm.agreement import agree, gather
from pyops.flat import Placement
from pyops.tensor_parallel.blueprint import Blueprint
from pyops.tensor_parallel.edges import Enter, JoinTokens, SplitTokens
from pyops.tensor_parallel.heads import set_heads
from pyops.tensor_parallel.multihead import MultiheadAttention
from pyops.tensor_parallel.swap import swapped

__all__ = ["Report", "parallelize"]


@dataclass
class Report:
    """What `parallelize` did. cut: {module: kind}; changed: {module: {attribute: (before, after)}}; replicated: parameters that
    are whole on every rank; elements: of the model's parameters before, and on this rank."""

    cut: dict[str, str] = field(default_factory=dict)
    changed: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    replicated: list[str] = field(default_factory=list)
    elements: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        lines = [f"{self.elements[0]:,} parameters, of which {self.elements[1]:,} on this rank"]
        cut = [f"{name}: {kind}" for name, kind in self.cut.items()]
        changed = [
            f"{name}: {', '.join(f'{k} {a} -> {b}' for k, (a, b) in each.items())}" for name, each in self.changed.items()
        ]
        for title, entries in (("cut", cut), ("changed", changed), ("whole on every rank", self.replicated)):
            times: dict[str, int] = {}
            for entry in entries:
                name, _, rest = entry.partition(":")
                each = ".".join("*" if part.isdigit() else part for part in name.split(".")) + (":" + rest if rest else "")
                times[each] = times.get(each, 0) + 1
            lines += [title, *(f"    {each}" + (f"  ({n})" if n > 1 else "") for each, n in times.items())] if times else []
        return "\n".join(lines)


def parallelize(
    model: nn.Module, *, group: dist.ProcessGroup | None = None, plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False, gather_logits: bool = True,
) -> Report:  # fmt: skip
    """Cut `model` over the ranks of `group`, in place. Call it before the optimizer is made, with the same values everywhere.

    plan: {pattern of module names: kind}, see pyops.tensor_parallel.plans; None: by the classes of the model's blocks
    (GPT-2, Llama, Mistral, Qwen 2 and 3, BERT, T5, ViT of transformers; torch.nn.TransformerEncoder and Decoder).
    sequence_parallel: between the blocks each rank holds its part of the tokens only; the gradients of what is whole there are
    parts, which `finish_gradients`, or ZeroOptimizer(tp_group=), sums.
    gather_logits: the head's logits are whole on every rank, so that any loss of them works; otherwise each rank has those of
    its part of the vocabulary, for `vocab_parallel_cross_entropy`, and the model must not be asked for its loss.

    Parameters keep their names; a Conv1D's weight then lies as [out, in], packed q, k, v as [3, out, in]. What the plan does
    not name stays whole on every rank, and is listed in the report. Dropout stays torch's: seed it alike on the ranks of the
    group, or their tokens drift apart. Hooks are on the modules, so model.forward must not be called past them.

    ValueError, on every rank and before anything is changed: no plan for these classes, a plan that names no module, a module
    that can't be cut, heads that can't be split (with the sizes that can), parameters within attention of which the plan does
    not say whether their gradients are parts, a model that is parallel already, models that differ between the ranks.
    """
    error: Exception | None = None
    blueprint: Blueprint | None = None
    try:
        blueprint = Blueprint(model, group, plan, sequence_parallel=sequence_parallel, gather_logits=gather_logits)
    except (TypeError, ValueError) as caught:
        error = caught
    if group is not None:
        agree(error, group=group)
    elif error is not None:
        raise error
    assert blueprint is not None
    if blueprint.ranks.size > 1:
        _check_same(
            model, {"plan": blueprint.kinds, "sequence_parallel": sequence_parallel, "gather_logits": gather_logits}, group
        )
    return _perform(model, blueprint)


def _check_same(model: nn.Module, options: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """ValueError, on every rank, unless options and parameters, their values too, are those of rank 0."""
    mine = [(key, repr(value)) for key, value in options.items()]
    for name, p in model.named_parameters():
        values = 0 if p.is_meta or not p.numel() else int(torch.hash_tensor(p.detach()).view(torch.int64))
        dtype, trained = str(p.dtype).removeprefix("torch."), "trained" if p.requires_grad else "frozen"
        mine.append((name, f"{list(p.shape)}, {dtype}, {trained}, values of hash {values & (1 << 64) - 1:x}"))
    everyone = gather(mine, group=group)
    for rank, theirs in enumerate(everyone):
        for (name, a), (other, b) in zip(everyone[0], theirs, strict=False):
            if (name, a) != (other, b):
                raise ValueError(
                    f"parallelize: the ranks' models differ: {name} ({a}) on rank 0, {other} ({b}) on rank {rank}; start "
                    "every rank from the same seed, or from the same files, with the same plan"
                )
        if len(theirs) != len(everyone[0]):
            raise ValueError(
                f"parallelize: the ranks' models differ: {len(everyone[0])} parameters on rank 0, {len(theirs)} on rank {rank}"
            )


@torch.no_grad()
def _perform(model: nn.Module, blueprint: Blueprint) -> Report:
    report = Report(cut={name: cut.kind for name, cut in blueprint.cuts.items()})
    elements = sum(p.numel() for p in model.parameters())
    whole = {name: blueprint.whole(name) for name in blueprint.modules}
    report.replicated = [
        ".".join(filter(None, (name, key))) for name, _ in model.named_modules() for key in whole[name]
    ]  # fmt: skip
    kept = [p for p in model.parameters() if id(p) in blueprint.tied]  # so that no other gets their ids
    _swap(model, blueprint)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and (new := blueprint.tied.get(id(p))) is not None:
                module.register_parameter(key, new)
    del kept
    _place_partial(blueprint, whole)
    for name, heads in blueprint.heads.items():
        if name not in blueprint.multihead and (changed := set_heads(model.get_submodule(name), heads)):
            report.changed[name] = changed
    for name in blueprint.regions if blueprint.ranks.size > 1 else ():
        tokens, flat = blueprint.shared_out(name), blueprint.kinds[name] == "mlp"
        hook = Enter(blueprint.ranks, tokens, flat=flat)
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
                    old, blueprint.heads[name], group=blueprint.group, sequence_parallel=blueprint.shared_out(name) is not None
                )
        kept.append(old)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, done[id(old)])
    for module in model.modules():
        if hasattr(module, "use_nested_tensor"):  # torch.nn.TransformerEncoder, which then goes past its layers
            module.use_nested_tensor = False  # type: ignore[assignment]


def _place_partial(blueprint: Blueprint, whole: Mapping[str, list[str]]) -> None:
    """Say of which whole parameters each rank has only a part of the gradient."""
    rank, ranks = blueprint.ranks.rank, blueprint.ranks.size
    for name, module in blueprint.modules.items():
        parts = blueprint.kinds.get(name) == "partial" or blueprint.shared_out(name) is not None
        if whole[name] and parts:
            module.placements = {  # type: ignore[assignment]
                key: Placement.whole(module.get_parameter(key).shape, rank=rank, ranks=ranks, partial=True)
                for key in whole[name]
            }
