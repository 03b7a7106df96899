"""1-bit Adam for ZeroOptimizer, which shards the states and communicates: its phases, as data.

    ZeroOptimizer(model, OneBitAdam, ZeroConfig(stage=1), config=OneBitConfig(warmup_steps=400))

asks OneBitAdam.over_shards(arguments).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.one_bit import OneBit
from pyops.onebit.config import OneBitConfig, checked_config, frozen_beta2_of
from pyops.optim.adam import AdamW
from pyops.optim.one_bit import KeptVariance, Warmup

__all__ = ["Phases", "phases_of"]

AS_ADAMW = ("lr", "betas", "eps", "weight_decay", "state_dtype", "capturable", "seed")
NOT_HERE = ("group", "model", "compat", "max_grad_norm")  # ZeroOptimizer has its own


@dataclass
class Phases:
    """The two phases of OneBitAdam as data, for an optimizer that shards the states."""

    inner: type[AdamW]
    """The optimizer of the warm-up."""

    arguments: dict[str, Any]
    """The arguments of `inner`."""

    warmup: Warmup
    """Decides when the warm-up is over."""

    codec: Codec
    """How gradients and parameters are encoded from then on."""

    kept_variance: KeptVariance
    """The second moment that is kept from then on."""

    def described(self) -> tuple[object, ...]:
        """What ranks compare."""
        return self.warmup.steps, self.codec.name, self.kept_variance.beta


def phases_of(who: str, arguments: Mapping[str, Any]) -> Phases:
    """The phases that the arguments of OneBitAdam ask for.

    Raises:
        TypeError, ValueError: for arguments that make no sense, or that ZeroOptimizer has itself.
    """
    who = f"{who} over shards"
    given = dict(arguments)
    config = given.pop("config", None)
    options = {key: given.pop(key) for key in list(given) if key not in AS_ADAMW}
    config = checked_config(who, config, OneBitConfig, options)
    for key in NOT_HERE:
        if (options if key == "max_grad_norm" else vars(config)).get(key) is not None:
            raise ValueError(f"{who}: leave {key} to ZeroOptimizer, which has its own")
    if config.reduction != "mean":
        raise ValueError(f"{who}: give reduction={config.reduction!r} to ZeroOptimizer")
    if config.precondition is False:
        raise ValueError(
            f"{who}: precondition=False can't be: gradients are sent, in units of sqrt(v); leave "
            "it out"
        )
    betas = given.get("betas", (0.9, 0.999))
    warmup = Warmup(
        config.warmup_steps, beta2=float(betas[1]), total_steps=config.total_steps, who=who
    )
    codec = OneBit() if config.codec is None else config.codec
    if not isinstance(codec, Codec) or not codec.streams or hasattr(codec, "all_reduce"):
        raise TypeError(
            f"{who}: codec={codec!r} must write blocks of numbers, such as OneBit() or Int8()"
        )
    kept = KeptVariance(frozen_beta2_of(config, who))
    options.pop("max_grad_norm", None)
    arguments = {"lr": 1e-3, "weight_decay": 0.0, **given, **options}
    return Phases(AdamW, arguments, warmup, codec, kept)
