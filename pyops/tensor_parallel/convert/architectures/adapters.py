"""Low-rank adapters of PEFT (Hu et al., LoRA, arXiv:2106.09685) around layers that are cut: what is
added to a layer's output has the same parts.

    columns   y = W x + B A x     W, B by columns      A whole, each rank a part of its gradient
    rows      y = W x + B A x     W, A by rows, sums   B whole, after the sum

The layer within the wrapper gets the kind that the plan has for the wrapper's name, so one plan
serves a model with and without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

__all__ = ["with_adapters"]

BASE = "base_layer"
ROWS = ("rows", "head rows")
COLUMNS = ("columns", "packed columns", "head columns", "gate and up")
REGIONS = ("attention", "configured attention", "mlp")
# PEFT's wrapper of a layer that is trained whole: as it was, and its trained copies.
SAVED, ORIGINAL = "modules_to_save", "original_module"


def with_adapters(modules: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> dict[str, str]:
    """The kinds of the modules within PEFT's wrappers, in place of the wrappers' own.

    Args:
        modules: All of the model's, by name.
        kinds: {name: kind} as the plan says, without regard to adapters.

    Raises:
        ValueError: For an adapter of which no cut is known, with the fix.
    """
    found = dict(kinds)
    for name, kind in kinds.items():
        if f"{name}.{SAVED}" in modules:
            del found[name]
            copies = [each for each, _ in modules[f"{name}.{SAVED}"].named_children()]
            found[f"{name}.{ORIGINAL}"] = kind
            found.update({f"{name}.{SAVED}.{each}": kind for each in copies})
        elif f"{name}.{BASE}" in modules:
            del found[name]
            found.update(_of_layer(name, kind, modules[name], kinds))
    return found


def _of_layer(
    name: str, kind: str, layer: nn.Module, kinds: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    _check(name, kind, layer)
    yield f"{name}.{BASE}", kind
    down, up = _kinds_of_factors(kind)
    for factor, each in (("lora_A", down), ("lora_B", up)):
        for adapter, _ in layer.get_submodule(factor).named_children():
            yield f"{name}.{factor}.{adapter}", each
    within = any(each in REGIONS and name.startswith(f"{outer}.") for outer, each in kinds.items())
    if kind in COLUMNS and not within:
        yield name, "mlp"  # three layers share one input: its gradient is summed once


def _kinds_of_factors(kind: str) -> tuple[str, str]:
    return (kind, "whole") if kind in ROWS else ("partial", kind)


def _check(name: str, kind: str, layer: nn.Module) -> None:
    what = f"{name} ({type(layer).__module__}.{type(layer).__name__})"
    if kind not in (*ROWS, *COLUMNS):
        raise ValueError(
            f"{what} is an adapter around a layer that is cut as {kind!r}, of which no cut is "
            f"known; leave {name.rpartition('.')[2]!r} out of the adapter's target_modules (or "
            "name it in modules_to_save, which trains it whole), or set tp to 1"
        )
    plain = type(layer).__module__ == "peft.tuners.lora.layer" and type(layer).__name__ == "Linear"
    variants = [type(each).__name__ for each in getattr(layer, "lora_variant", {}).values()]
    if not plain or variants:
        raise ValueError(
            f"{' with '.join([what, *variants[:1]])} is an adapter of which no cut is known; take "
            "plain LoRA (LoraConfig(use_dora=False)), or set tp to 1"
        )
