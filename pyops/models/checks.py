"""What the models' configurations have in common: which activations and positions there are, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ACTIVATIONS", "POSITIONS", "check_config"]

POSITIONS = ("learned", "rotary")

# name: the activation of ParallelMLP, and whether it is gated
ACTIVATIONS: Mapping[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "relu": {"activation": "relu"},
    "swiglu": {"activation": "silu", "gated": True},
    "gated_gelu": {"activation": "gelu_tanh", "gated": True},
}


def check_config(config: Any, *, at_least_one: Sequence[str], choices: Mapping[str, Sequence[str]]) -> None:
    """ValueError naming the field, its value and what would do; of fields that every model has."""
    for field in at_least_one:
        if getattr(config, field) < 1:
            raise ValueError(f"{field} is {getattr(config, field)}; it must be 1 or more")
    for field, known in choices.items():
        if getattr(config, field) not in known:
            raise ValueError(f"{field} is {getattr(config, field)!r}; choose one of {', '.join(known)}")
    if not getattr(config, "head_dim", 0) and config.dim % config.num_heads:
        raise ValueError(f"dim is {config.dim}, which num_heads = {config.num_heads} does not divide; change one of them")
    for field in ("hidden", "head_dim", "num_kv_heads"):
        if getattr(config, field, 0) < 0:
            raise ValueError(f"{field} is {getattr(config, field)}; give a number, or 0 for the usual one")
    for field in ("dropout", "attention_dropout"):
        if not 0.0 <= getattr(config, field) < 1.0:
            raise ValueError(f"{field} is {getattr(config, field)}; it is a probability, 0 or more and less than 1")
    if getattr(config, "positions", None) == "rotary":
        _check_rotary(config)
    if not config.norm_eps > 0.0:
        raise ValueError(f"norm_eps is {config.norm_eps}; it must be more than 0")


def _check_rotary(config: Any) -> None:
    if (width := getattr(config, "head_dim", 0) or config.dim // config.num_heads) % 2:
        of = "head_dim, or " if hasattr(config, "head_dim") else ""
        raise ValueError(
            f"positions is 'rotary', which turns pairs, but a head is {width} wide ({of}dim {config.dim} / num_heads "
            f"{config.num_heads}); make that even"
        )
    if not config.rotary_theta > 0.0:
        raise ValueError(f"rotary_theta is {config.rotary_theta}; it must be more than 0, such as 10000")
