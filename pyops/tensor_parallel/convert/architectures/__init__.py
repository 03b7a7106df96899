"""Plans by the class names of models' blocks: data, a file for each family; their kinds are
explained in plans.py."""

from __future__ import annotations

from pyops.tensor_parallel.convert.architectures import (
    decoders,
    encoder_decoders,
    encoders,
    pictures,
)

__all__ = ["PLANS"]

PLANS: dict[str, dict[str, str]] = {
    **decoders.PLANS,
    **encoders.PLANS,
    **encoder_decoders.PLANS,
    **pictures.PLANS,
}
