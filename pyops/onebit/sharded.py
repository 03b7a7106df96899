"""1-bit Adam for whoever shares out its states over ranks, and does the communicating: its two
phases, as data.

ZeroOptimizer(model, OneBitAdam, stage=1, warmup_steps=400, lr=3e-4)     asks OneBitAdam.over_shards(arguments)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.one_bit import OneBit
from pyops.optim.adam import AdamW
from pyops.optim.one_bit_warmup import Warmup

__all__ = ["Phases", "phases_of"]

NOT_HERE = (
    "group",
    "model",
    "op",
    "compat",
    "max_grad_norm",
)  # the one who shares states out has its own
OWN = ("warmup_steps", "total_steps", "codec", "frozen_beta2", "precondition")


@dataclass
class Phases:
    """inner: the optimizer of the warm-up, and its arguments. warmup: says when it is over. codec:
    how numbers travel then. frozen_beta2: the decay of the mean of squared gradients that is kept
    from then on, where it is more than beta2."""

    inner: type[AdamW]
    arguments: dict[str, Any]
    warmup: Warmup
    codec: Codec
    frozen_beta2: float
    steps: int | str

    def described(self) -> tuple[object, ...]:
        """For comparing ranks."""
        return self.steps, self.codec.name, self.frozen_beta2


def phases_of(who: str, arguments: Mapping[str, Any]) -> Phases:
    """Of the arguments of OneBitAdam; ValueError or TypeError for those that make no sense."""
    given = dict(arguments)
    for key in NOT_HERE:
        if given.pop(key, None) is not None:
            raise ValueError(
                f"{who} over shards: leave {key} to the optimizer that shares the states out"
            )
    own = {key: given.pop(key) for key in OWN if key in given}
    if own.get("precondition") is False:
        raise ValueError(
            f"{who} over shards: gradients travel, in units of sqrt(v); leave "
            "precondition=False out"
        )
    for key in ("amsgrad", "maximize", "stochastic_rounding"):
        if given.get(key):
            raise ValueError(f"{who} over shards: {key}=True has no compressed phase; leave it out")
    steps, betas = own.get("warmup_steps"), given.get("betas", (0.9, 0.999))
    warmup = Warmup(steps, beta2=float(betas[1]), total_steps=own.get("total_steps"), who=who)  # type: ignore[arg-type]
    codec = OneBit() if own.get("codec") is None else own["codec"]
    if not isinstance(codec, Codec) or not codec.streams or hasattr(codec, "all_reduce"):
        raise TypeError(
            f"{who} over shards: codec={codec!r} must write blocks of numbers, such as "
            "OneBit() or Int8()"
        )
    slow = own.get("frozen_beta2")
    if slow is None:
        slow = 0.995 if not isinstance(steps, int) else max(0.0, 1 - 2 / steps)
    if not (isinstance(slow, int | float) and 0 <= slow < 1):
        raise ValueError(
            f"{who} over shards: frozen_beta2={slow!r} must be in [0, 1), such as 0.999, or None"
        )
    given.setdefault("lr", 1e-3)
    given.setdefault("weight_decay", 0.0)
    return Phases(AdamW, given, warmup, codec, float(slow), warmup.steps)
