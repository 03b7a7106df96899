"""Plans: which modules of a transformer are cut, and how; data that `parallelize` goes by.

A plan is {pattern: kind}. A pattern is the end of a module's qualified name, with shell wildcards
within a part: "attn.c_proj" is transformer.h.0.attn.c_proj, transformer.h.1.attn.c_proj, ... Where
several patterns fit, the one of more parts counts.

| kind | module | what becomes of it |
|---|---|---|
| "columns" | linear | each rank computes some of its outputs; within an attention module, whole
heads of them |
| "packed columns" | linear within an attention module | the same of each of the matrices that lie
in one: q, k, v |
| "head columns" | linear within an attention module | q, k and v of a head, or group of heads, lie
together: cut between | | "gate and up" | linear | two equal matrices that lie in one, each cut by
columns |
| "rows" | linear | each rank holds some of its inputs, and the products are summed; within
attention by whole heads |
| "head rows" | linear | "rows" by the heads of the nearest attention module, for an output that
lies outside of it |
| "vocabulary" | embedding | each rank holds some of its rows |
| "logits" | linear | columns, which are put together again for the loss |
| "bias by head" | embedding [buckets, heads] within an attention module | cut along its heads |
| "partial" | any, within attention or mlp | whole on every rank; used on own heads, so each has a
part of its gradient |
| "whole" | any, within attention or mlp | whole on every rank, and so is its gradient: it works on
what was summed |
| "attention" | any | its numbers of heads become this rank's; its input is
what the ranks share |
| "configured attention" | any | the same; its code reads numbers from its config, of which it gets
a copy of its own |
| "mlp" | any | several columns within it share one input |
| "blocks" | list | between these the tokens are shared out under sequence parallelism |

What no pattern names stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from pyops.tensor_parallel.convert.architectures import PLANS

__all__ = ["ATTENTION", "CUT", "KINDS", "PLANS", "REGIONS", "assign", "plan_of"]

Plan = Mapping[str, str]

CUT = (
    "columns",
    "packed columns",
    "head columns",
    "gate and up",
    "rows",
    "head rows",
    "vocabulary",
    "logits",
    "bias by head",
)
ATTENTION = ("attention", "configured attention")
REGIONS = (*ATTENTION, "mlp")
KINDS = (*CUT, "partial", "whole", *REGIONS, "blocks")


def plan_of(model: nn.Module) -> Plan:
    """The plan for the blocks that the model is made of.

    Raises:
        ValueError: Where none is known, or where two would have to meet.
    """
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    found = [plan for name, plan in PLANS.items() if name in names]
    if not found:
        raise ValueError(
            f"no plan is known for {type(model).__name__}; there are plans for "
            f"{', '.join(PLANS)}. Give one as plan={{pattern: "
            f"kind}}, such as {{'attn': 'attention', 'attn.[qkv]': 'columns', "
            f"'attn.out': 'rows'}}; kinds: {', '.join(KINDS)}"
        )
    if any(plan != found[0] for plan in found):
        blocks = [name for name in PLANS if name in names]
        raise ValueError(
            f"the model has blocks of several plans, {', '.join(blocks)}; parallelize "
            "each part, or give plan="
        )
    return found[0]


def assign(model: nn.Module, plan: Plan, *, complete: bool) -> dict[str, str]:
    """{qualified name of a module: kind}.

    ValueError: a kind that there is not, a pattern, or a plan, that names no module, two patterns
    that fit equally well.

    Args:
        complete: Every pattern must name a module.
    """
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise ValueError(f"plan: {pattern!r} is {kind!r}; choose one of {', '.join(KINDS)}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    fitting: dict[str, list[str]] = {}
    for pattern in plan:
        found = [name for name in names if _fits(pattern, name)]
        if complete and not found:
            raise ValueError(
                f"plan: {pattern!r} names no module of {type(model).__name__}; it has "
                f"{_some(names)}"
            )
        for name in found:
            fitting.setdefault(name, []).append(pattern)
    chosen = {}
    for name, patterns in fitting.items():
        parts = max(pattern.count(".") for pattern in patterns)
        longest = [pattern for pattern in patterns if pattern.count(".") == parts]
        if len({plan[pattern] for pattern in longest}) > 1:
            raise ValueError(
                f"plan: {name} fits {longest}, which are of different kinds; write one "
                "of them with more parts"
            )
        chosen[name] = plan[longest[0]]
    if not any(kind in CUT for kind in chosen.values()):
        raise ValueError(
            f"the plan names no module of {type(model).__name__} to cut; it has {_some(names)}"
        )
    return chosen


def _fits(pattern: str, name: str) -> bool:
    wanted, has = pattern.split("."), name.split(".")
    return len(wanted) <= len(has) and all(
        fnmatchcase(h, w) for w, h in zip(reversed(wanted), reversed(has), strict=False)
    )


def _some(names: list[str]) -> str:
    """What the modules are called, each ending once."""
    ends = list(
        dict.fromkeys(
            ".".join(p for p in name.split(".")[-2:] if not p.isdigit()) for name in names
        )
    )
    return ", ".join(each for each in ends if each)[:600] or "no modules"
