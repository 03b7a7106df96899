"""Which linear layers read what a norm, or another layer, gives, and a scale that moves from their
input into their weights: the model computes what it did.

    norm: y = n(x) * w + b           w / s, b / s      y / s
    readers: y W^T                   W * s             (y / s) (W s)^T = y W^T       for all of them

Found by running an example: only a norm whose result nothing but these layers takes can be divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyops.quantized.calibration.inputs import Batch, run
from pyops.quantized.layers import (
    matrix,
    own_inputs,
    place_of_input,
    users_of_weights,
)
from pyops.tensor_parallel import ParallelAttention, ParallelMLP
from pyops.torch_private import TorchDispatchMode

__all__ = ["Readers", "fold", "largest_inputs", "readers_of_layers", "readers_of_norms"]


@dataclass
class Readers:
    """What can be divided, and the linear layers that read it."""

    name: str
    """Of the norm, or of the layer."""
    divide: Callable[[Tensor], None]
    """Divides the result by a scale [in], float32 or wider."""
    layers: dict[str, nn.Module] = field(default_factory=dict)
    """The readers, by their names."""
    others: list[str] = field(default_factory=list)
    """What else takes the result: then it can't be divided."""
    sharing: tuple[int, int, int] | None = None
    """(groups, heads, width): inputs [groups, heads, width] of which the heads of a group are made
    of the same numbers, and have one scale."""

    def shared(self, values: Tensor) -> Tensor:
        """The mean over inputs that have one scale.

        Args:
            values: [in].
        """
        if self.sharing is None:
            return values
        grid = values.view(self.sharing)
        return grid.mean(1, keepdim=True).expand(self.sharing).reshape(-1)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("Norm")
    return named and isinstance(weight, Tensor) and weight.dim() == 1


class _Consumers(TorchDispatchMode):
    """Notes every operation outside of the readers that takes a norm's result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, Readers] = {}
        self.kept: list[Tensor] = []  # so that no other tensor gets their identity
        self.inside = 0

    def of(self, x: Any) -> Readers | None:
        return self.found.get(id(x)) if isinstance(x, Tensor) else None

    def note(self, x: Tensor, readers: Readers) -> None:
        self.found[id(x)] = readers
        self.kept.append(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside:
            return out
        flat = [x for a in args for x in (a if isinstance(a, list | tuple) else [a])]
        for readers in filter(None, map(self.of, flat)):
            views = [r.alias_info is not None for r in func._schema.returns]
            if views == [True] and isinstance(out, Tensor):
                self.note(out, readers)  # another shape of the same numbers
            else:
                readers.others.append(str(func))
        return out


def readers_of_norms(
    model: nn.Module, batch: Batch, layers: Mapping[str, nn.Module]
) -> list[Readers]:
    """The norms that one or more of the layers read, and nothing else.

    Args:
        model: in evaluation mode.
        batch: an example.
        layers: linear layers by name.
    """
    names = {id(module): name for name, module in model.named_modules()}
    norms = {
        name: Readers(name, partial(_divide_norm, module))
        for name, module in model.named_modules()
        if _is_norm(module)
    }
    users = users_of_weights(model)
    consumers, hooks = _Consumers(), []

    def result(norm: nn.Module, _: Any, out: Any) -> None:
        consumers.note(out[0] if isinstance(out, tuple) else out, norms[names[id(norm)]])

    def enter(place: nn.Module, args: tuple[Any, ...]) -> None:
        readers = consumers.of(args[0]) if args else None
        if readers is not None:
            readers.layers |= at[id(place)]
        consumers.inside += 1

    def leave(*_: Any) -> None:
        consumers.inside -= 1

    at: dict[int, dict[str, nn.Module]] = {}
    places = []
    for name, layer in layers.items():
        place = place_of_input(model, name, layer)
        if id(place) not in at:
            places.append(place)
        at.setdefault(id(place), {})[name] = layer
    # Of an attention that gives its input to two layers both have to be among the readers
    places = [p for p in places if not isinstance(p, ParallelAttention) or len(at[id(p)]) == 2]
    try:
        for name in norms:
            hooks.append(model.get_submodule(name).register_forward_hook(result))
        for place in places:
            hooks += [place.register_forward_pre_hook(enter), place.register_forward_hook(leave)]
        with torch.no_grad(), consumers:
            model(batch) if isinstance(batch, Tensor) else model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    for entry in norms.values():
        entry.others += [n for n, m in entry.layers.items() if len(users[id(m.weight)]) > 1]
    return [entry for entry in norms.values() if entry.layers and not entry.others]


def readers_of_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[Readers]:
    """Layers of pyops whose result another one takes, unchanged but for sums and factors: the up
    half of a gated MLP before its down layer, and the values of attention before its output.

    Args:
        model: any.
        layers: linear layers by name, of which both are to be.
    """
    found = []
    for name, module in model.named_modules():
        source, reader, heads = None, None, None
        if isinstance(module, ParallelMLP) and module.gated:
            source, reader = "up", "down"
        elif isinstance(module, ParallelAttention) and module.copies == 1 and not module.cross:
            source, reader = "qkv" if module.merged else "kv", "output"
            groups = module.output.in_features // (module.per_group * module.head_dim)
            heads = (groups, module.per_group, module.head_dim)
        if source is None or not {f"{name}.{source}", f"{name}.{reader}"} <= set(layers):
            continue
        below = layers[f"{name}.{reader}"]
        divide = partial(_divide_rows, layers[f"{name}.{source}"], below, heads)
        readers = {f"{name}.{reader}": below}
        found.append(Readers(f"{name}.{source}", divide, readers, sharing=heads))
    return found


@torch.no_grad()
def _divide_norm(norm: Any, scale: Tensor) -> None:
    offset = float(getattr(norm, "offset", 0.0))
    norm.weight.copy_((norm.weight.to(scale.dtype) + offset) / scale - offset)
    if getattr(norm, "bias", None) is not None:
        norm.bias.copy_(norm.bias.to(scale.dtype) / scale)


@torch.no_grad()
def _divide_rows(
    source: Any, reader: nn.Module, heads: tuple[int, int, int] | None, scale: Tensor
) -> None:
    """Divide the rows of up, or those of values, that this rank holds."""
    own = own_inputs(reader, scale, 1.0)
    if heads is not None:
        own = own.view(-1, *heads[1:])[:, 0]  # [groups, width]
    for key in ("weight", "bias"):
        parameter = getattr(source, key)
        if parameter is None:
            continue
        tail = parameter.shape[-1:] if key == "weight" else ()
        if heads is None:
            rows = parameter[1]
        else:
            parts = len(parameter) // own.numel()  # query, key, value; or key, value
            rows = parameter.view(len(own), parts, heads[2], *tail)[:, -1]
        by = own.reshape(*own.shape, *[1] * len(tail))
        rows.copy_(rows.to(scale.dtype) / by)


@torch.no_grad()
def fold(readers: Readers, scale: Tensor) -> None:
    """Divide what is read by `scale`, and multiply all readers' weights.

    Args:
        readers: what can be divided, and its readers.
        scale: [in], above 0, the same on every rank.
    """
    for layer in readers.layers.values():
        weight = matrix(layer)
        wide = scale.to(torch.promote_types(weight.dtype, torch.float32))
        weight.copy_(weight.to(wide.dtype) * own_inputs(layer, wide, 1.0))
    readers.divide(wide)


def largest_inputs(
    model: nn.Module, batches: list[Batch], layers: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """fp32 [in] for each layer: the largest |x| of each input over the examples.

    Args:
        model: in evaluation mode.
        batches: examples.
        layers: by name.
    """
    largest: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        found = x.float().abs().amax(0)
        largest[name] = torch.maximum(largest.get(name, found), found)

    run(model, batches, layers, see)
    return largest
