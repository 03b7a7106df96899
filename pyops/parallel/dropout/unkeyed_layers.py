"""What drops by torch's generator and can't be keyed: the masks, and with them the loss, would be
others on each layout of ranks. It is refused before anything is changed.

| what | why |
|---|---|
| torch.nn.Dropout1d, 2d, 3d, AlphaDropout, FeatureAlphaDropout, RReLU | each draws in its own way |
| layers that are left out at random (layerdrop) | which ones is drawn in the model's own code |
| flash attention with dropout | its kernel draws |
| torch.nn.MultiheadAttention with batch_first=False | its rows are the second dimension |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["check_keyed", "largest_probability"]

OTHER_DROPOUTS = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def check_keyed(model: nn.Module, calls_attention: Callable[[nn.Module], bool]) -> None:
    """Refuse a model with layers that draw in a way that can't be keyed.

    Args:
        model: Before anything of it is keyed.
        calls_attention: Whether a module calls attention functions that drop.

    Raises:
        ValueError: Names the module and the fix.
    """
    for name, module in model.named_modules():
        reason = _reason(module, calls_attention)
        if reason is not None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) {reason}; its masks would be "
                "others on each layout of the ranks"
            )


def _reason(module: nn.Module, calls_attention: Callable[[nn.Module], bool]) -> str | None:
    """What is drawn, and what to do instead; None where nothing is."""
    if isinstance(module, OTHER_DROPOUTS) and module.p > 0.0:
        return f"drops with p {module.p} by torch's generator: use torch.nn.Dropout, or set p to 0"
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return "draws its slopes by torch's generator: use torch.nn.LeakyReLU"
    if (p := _layerdrop(module)) > 0.0:
        return (
            f"leaves layers out at random, with layerdrop {p}: set the layerdrop of the model's "
            "config to 0"
        )
    if isinstance(module, nn.MultiheadAttention):
        if module.dropout > 0.0 and not module.batch_first:
            return (
                f"drops with p {module.dropout} from tensors [T, B, D], whose rows are not the "
                "first dimension: make it with batch_first=True, or set its dropout to 0"
            )
        return None
    attention = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
    if "flash" in attention and calls_attention(module) and (p := _of_attention(module)) > 0.0:
        return (
            f"drops with p {p} in the kernel of {attention!r}: give the model "
            'attn_implementation="sdpa" or "eager", or set the attention\'s dropout to 0'
        )
    return None


def _layerdrop(module: nn.Module) -> float:
    """Of the module's own, or of the config that its forward asks."""
    config = getattr(module, "config", None)
    found = [vars(module).get("layerdrop", 0.0), getattr(config, "layerdrop", 0.0)]
    return max((p for p in found if _is_probability(p)), default=0.0)


def _of_attention(module: nn.Module) -> float:
    """The dropout of a module's attention, by the names that transformers has for it."""
    named = {**vars(module), **vars(module).get("_modules", {})}
    own = {name: value for name, value in named.items() if "drop" in name}
    of_attention = {name: value for name, value in own.items() if "att" in name}
    return largest_probability((of_attention or own).values()) or 0.0


def largest_probability(values: Any) -> float | None:
    """The largest number among these, or among the `p` of those that are modules; None where there
    is none.

    Args:
        values: Attributes.
    """
    numbers = [getattr(value, "p", value) for value in values]
    return max((float(p) for p in numbers if _is_probability(p)), default=None)


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
