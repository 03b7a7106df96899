"""Whose state_dict is this: an optimizer is known by a hyper-parameter that only it has, and by
what it keeps of a parameter.

{"state": {0: {"exp_avg": ...}}, "param_groups": [{"betas": ..., no "eps"}]}
        Lion's: SGD would begin anew, silently
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_kind", "kind_of"]

# Name: the hyper-parameter, and the states. Those that only torch has are here to be named.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "LARS": ("trust_coefficient", ("momentum_buffer",)),
    "LAMB": ("min_ratio", ("exp_avg", "exp_avg_sq")),
    "Adam": ("amsgrad", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "SGD": ("nesterov", ("momentum_buffer",)),
    "Adagrad": ("lr_decay", ("sum",)),
    "Adafactor": ("beta2_decay", ("row_var", "col_var", "variance")),
    "Lion": ("betas", ("exp_avg",)),
    "RMSprop": ("centered", ("square_avg", "momentum_buffer", "grad_avg")),
    "Adadelta": ("rho", ("square_avg", "acc_delta")),
    "NAdam": ("momentum_decay", ("exp_avg", "exp_avg_sq", "mu_product")),
    "Rprop": ("etas", ("prev", "step_size")),
    "ASGD": ("lambd", ("eta", "mu", "ax")),
}
STATES = {entry for _, entries in KINDS.values() for entry in entries} | {"exp_inf"}
OTHERS = {"SGD": "trust_coefficient", "Lion": "eps"}  # who has this too is another one


def _is(kind: str, group: Mapping[str, Any]) -> bool:
    return KINDS[kind][0] in group and OTHERS.get(kind) not in group


def kind_of(group: Mapping[str, Any]) -> str | None:
    """The optimizer that has such a param group; None: unknown."""
    return next((kind for kind in KINDS if _is(kind, group)), None)


def check_kind(defaults: Mapping[str, Any], saved: Mapping[str, Any], *, who: str) -> None:
    """ValueError where a state_dict is known to be that of another optimizer than the one with
    these defaults."""
    mine = kind_of(defaults)
    if mine is None:
        return
    fix = f"load that of a {who}, or begin anew without it"
    for group in saved["param_groups"]:
        theirs = mine if _is(mine, group) else kind_of(group)
        if theirs not in (None, mine):
            raise ValueError(
                f"{who}: the state_dict is that of {theirs} (its groups have "
                f"{KINDS[theirs][0]!r}); {fix}"
            )
    for key, state in saved["state"].items():
        kept = STATES & set(state)
        if foreign := sorted(kept - set(KINDS[mine][1])):
            raise ValueError(
                f"{who}: the state_dict has {foreign} for parameter {key}, which {mine} "
                "does not keep: it is that of another "
                f"optimizer; {fix}"
            )
        if mine in ("Adam", "LAMB") and "exp_avg" in kept and "exp_avg_sq" not in kept:
            raise ValueError(
                f"{who}: the state_dict has no 'exp_avg_sq' for parameter {key}: it is "
                f"that of Lion; {fix}"
            )
