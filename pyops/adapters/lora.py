"""LoRA: the linear layers of a model learn an update of low rank, and their weights stay as they
are (Hu et al., arXiv:2106.09685).

    model = GPT(...)
    lora = LoRA(model, rank=8, alpha=16, only=["blocks.*.attention.*"])
    optimizer = AdamW(lora.parameters())      train as ever: model.loss(...) has the updates
    lora.merge()                              W += alpha / r B A

    layers of pyops.tensor_parallel    cut by columns or rows, and the vocabulary head: see LowRank
    pyops.quantized.QuantizedLinear    the same, and of anybody's models, with codes as the weight
    torch.nn.Linear, Conv1D            of models of anybody's, on one rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import ranks_agree
from pyops.given_numbers import check_number, is_whole
from pyops.name_patterns import check_patterns, matching
from pyops.ops.layers.activation import FLOATS
from pyops.ops.memory import require_memory
from pyops.quantized import QuantizedLinear
from pyops.quantized.layers import is_conv1d, is_head, ranks_of
from pyops.tensor_parallel import ColumnParallelLinear, LowRank, RowParallelLinear

__all__ = ["LoRA", "attach", "check_adapters", "linear_layers"]


_WITH_ADAPTERS = ColumnParallelLinear | RowParallelLinear | QuantizedLinear
"""Layers that apply their adapter themselves."""


def is_linear(module: nn.Module) -> bool:
    """Whether an adapter can be of this layer."""
    return isinstance(module, _WITH_ADAPTERS | nn.Linear) or is_conv1d(module)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can have an adapter, by their names.

    Args:
        model: Any.
    """
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def sizes(layer: nn.Module) -> tuple[int, int]:
    """(in, out) of the whole layer; of several stacked matrices those of one."""
    if is_conv1d(layer):
        weight: Any = layer.weight
        return weight.shape[0], weight.shape[1]
    return layer.in_features, layer.out_features  # type: ignore[return-value]


class LoRA:
    """The adapters of a model. Its own parameters no longer require gradients; those of the
    adapters do. At first B is 0, and the model computes what it did.

    Args:
        model: Of pyops.models or anybody's; on several tensor-parallel ranks all make it alike.
        rank: r, the rows of A.
        alpha: The update is scaled by alpha / r.
        only: Patterns of the names of layers, ["blocks.*.attention.*"]; None: all linear layers but
            the vocabulary head, and those of fewer outputs than `rank`, such as a classifier's.
        dropout: Probability with which elements of a layer's input are dropped for the adapter; in
            layers of pyops keyed by `pyops.tensor_parallel.set_dropout`.
        seed: Of A, drawn by (seed, name): the same on any number of ranks.
        dtype: Of A and B; None: that of the weights.

    Raises:
        ValueError: For a rank above a layer's width, a pattern that matches no layer, layers that
            have an adapter already, numbers without sense; nothing is changed then.
        TypeError: For a model that is none, and patterns that are no texts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        only: Sequence[str] | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_options(rank=rank, alpha=alpha, dropout=dropout, seed=seed, dtype=dtype)
        ranks = dict.fromkeys(_names(model, rank, only), rank)
        attach(model, ranks, scale=alpha / max(rank, 1), dropout=dropout, seed=seed, dtype=dtype)
        self._set(model, alpha=alpha, rank=rank, dropout=dropout)

    def _set(self, model: nn.Module, *, alpha: float, rank: int, dropout: float) -> None:
        self.model, self.alpha, self.rank, self.dropout = model, alpha, rank, dropout
        self.layers = {
            name: layer
            for name, layer in linear_layers(model).items()
            if getattr(layer, "adapter", None) is not None
        }
        self.merged = self.was_merged = False

    @classmethod
    def of(cls, model: nn.Module, *, alpha: float, rank: int, dropout: float = 0.0) -> LoRA:
        """The adapters that a model has already.

        Args:
            model: With adapters.
            alpha: Of them.
            rank: Of them.
            dropout: Of them.
        """
        found = cls.__new__(cls)
        found._set(model, alpha=alpha, rank=rank, dropout=dropout)
        return found

    @property
    def adapters(self) -> dict[str, LowRank]:
        """Those of the layers, by the layers' names."""
        return {name: layer.adapter for name, layer in self.layers.items()}  # type: ignore[misc]

    def parameters(self) -> Iterator[nn.Parameter]:
        """A and B of all layers."""
        for adapter in self.adapters.values():
            yield adapter.A
            yield adapter.B

    @torch.no_grad()
    def merge(self) -> None:
        """Add the updates to the weights, W += alpha / r B A, computed in fp32: the model computes
        without adapters, at the cost of none.

        Raises:
            ValueError: On every rank that shares the layers, for weights that are whole numbers, a
                weight that another layer has, too, adapters that are not finite, or weights that
                ZeRO has shared out; nothing is changed then.
        """
        if self.merged:
            return
        with ranks_agree(ranks_of(self.model).group):
            self._check_weights("merge")
            self.check_finite("merge")
        self._add(1.0)
        self.merged = self.was_merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the updates again: the weights are what they were, to rounding."""
        if not self.merged:
            return
        self._check_weights("unmerge")
        self._add(-1.0)
        self.merged = False

    def check_finite(self, what: str) -> None:
        """Refuse adapters that have a number that is not finite, on this rank.

        Args:
            what: The caller, for the message.

        Raises:
            ValueError: Naming the layer.
        """
        for name, adapter in self.adapters.items():
            for key in "AB":
                if not bool(torch.isfinite(adapter.get_parameter(key)).all()):
                    raise ValueError(
                        f"{what}: {key} of the adapter of {name} has a number that is not finite; "
                        "load adapters of an earlier step"
                    )

    def _add(self, sign: float) -> None:
        for layer in self.layers.values():
            adapter: LowRank = layer.adapter  # type: ignore[assignment]
            weight: Tensor = layer.weight  # type: ignore[assignment]
            delta = sign * adapter.delta()
            if is_conv1d(layer):
                delta = delta.t()
            weight.data.copy_(weight.to(delta.dtype) + delta)
            adapter.enabled = sign < 0

    def _check_weights(self, what: str) -> None:
        users: dict[int, str] = {}
        for name, module in self.model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                users.setdefault(id(parameter), f"{name}.{key}")
        for name, layer in self.layers.items():
            weight: Tensor = layer.weight  # type: ignore[assignment]
            if not weight.is_floating_point():
                raise ValueError(
                    f"{what}: the weight of {name} is {weight.dtype}, which can't hold the update; "
                    "make it a floating one first (dequantize it)"
                )
            require_memory(weight, f"{what}: the weight of {name}")
            if users[id(weight)] != f"{name}.weight":
                raise ValueError(
                    f"{what}: the weight of {name} is {users[id(weight)]}, too, and would change; "
                    "make the model with a head of its own, or leave the head out of `only`"
                )

    def remove(self) -> None:
        """Take the adapters off the model. What was merged stays in the weights; what was not is
        lost."""
        for layer in self.layers.values():
            handle = layer.__dict__.pop("_adapter_hook", None)
            if handle is not None:
                handle.remove()
                del layer.adapter
            else:
                layer.adapter = None  # type: ignore[assignment]
        self.layers = {}


def _names(model: nn.Module, rank: int, only: Sequence[str] | None) -> list[str]:
    """Of the layers that would have an adapter."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; adapters are of an nn.Module")
    layers = linear_layers(model)
    if only is not None:
        check_patterns(only, what="only")
        if not only:
            raise ValueError(
                f"only is {only!r}, which names no layer; leave it out, or give patterns"
            )
        return matching(list(layers), only, what="only")
    wide = [name for name, layer in layers.items() if not is_head(model, layer)]
    found = [name for name in wide if sizes(layers[name])[1] >= rank]
    if wide and not found:
        largest = max(min(sizes(layers[name])) for name in wide)
        raise ValueError(
            f"rank is {rank!r}, but no linear layer of {type(model).__name__} has so many outputs; "
            f"give a whole number from 1 to {largest}"
        )
    return found


def check_options(
    *, rank: object, alpha: object, dropout: object, seed: object, dtype: object
) -> None:
    """Refuse options of `LoRA` without sense, whatever the model.

    Args:
        rank: As of `LoRA`; so all others.
        alpha: See rank.
        dropout: See rank.
        seed: See rank.
        dtype: See rank.

    Raises:
        ValueError: Naming option, value and fix.
    """
    if not is_whole(rank):
        raise ValueError(f"rank is {rank!r}; give a whole number, 1 or more")
    check_number("alpha", alpha, lambda v: 0 < v < math.inf, "give a number above 0")
    check_number(
        "dropout",
        dropout,
        lambda v: 0 <= v < 1,
        "it is a probability, 0 or more and less than 1",
    )
    if not is_whole(seed):
        raise ValueError(f"seed is {seed!r}; give a whole number")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(
            f"dtype is {dtype!r}; give one of {', '.join(map(str, FLOATS))}, or None for that of "
            "the weights"
        )


def check_adapters(model: nn.Module, *, rank: int, only: Sequence[str] | None = None) -> None:
    """Refuse what `LoRA` would, and change nothing; the parameters need no memory.

    Args:
        model: As of `LoRA`.
        rank: As of `LoRA`.
        only: As of `LoRA`.

    Raises:
        ValueError: As of `LoRA`.
    """
    _check(model, dict.fromkeys(_names(model, rank, only), rank))


def _check(model: nn.Module, ranks: dict[str, int]) -> None:
    if not ranks:
        raise ValueError(f"{type(model).__name__} has no linear layer that an adapter could be of")
    layers = linear_layers(model)
    for name, rank in ranks.items():
        layer = layers[name]
        if getattr(layer, "adapter", None) is not None:
            raise ValueError(
                f"{name} has an adapter already; merge it, or take it off with remove()"
            )
        inner, out = sizes(layer)
        if not 1 <= rank <= min(inner, out):
            raise ValueError(
                f"rank is {rank!r}, but {name} is [{out}, {inner}]; give a whole number from 1 to "
                f"{min(inner, out)}, or leave the layer out"
            )


def attach(
    model: nn.Module,
    ranks: dict[str, int],
    *,
    scale: float,
    dropout: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Give layers adapters, and let no other parameter of the model require a gradient.

    Args:
        model: Whose layers they are.
        ranks: {name of a layer: r}.
        scale: Of the updates.
        dropout: Of the inputs.
        seed: Of A.
        dtype: Of A and B.

    Raises:
        ValueError: As of `LoRA`.
    """
    check_options(rank=1, alpha=1.0, dropout=dropout, seed=seed, dtype=dtype)
    _check(model, ranks)
    layers = linear_layers(model)
    model.requires_grad_(False)
    for name, rank in ranks.items():
        layer = layers[name]
        adapter = _adapter(layer, rank, scale=scale, dropout=dropout, dtype=dtype)
        adapter.reset_parameters(seed=seed, name=name)
        adapter.train(layer.training)
        layer.adapter = adapter
        if not isinstance(layer, _WITH_ADAPTERS):
            layer.__dict__["_adapter_hook"] = layer.register_forward_hook(_after)


def _after(layer: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    result: Tensor = layer.adapter(args[0], y)
    return result


def _adapter(
    layer: Any, rank: int, *, scale: float, dropout: float, dtype: torch.dtype | None
) -> LowRank:
    weight: Tensor = layer.weight
    drop: nn.Module | None = None
    inner, out = sizes(layer)
    placements = None
    shapes: dict[str, tuple[int, ...]] = {"A": (rank, inner), "B": (out, rank)}
    if isinstance(layer, _WITH_ADAPTERS):
        placements = layer.low_rank_places(rank)
        shapes = {name: place.local_shape for name, place in placements.items()}
        drop = layer.low_rank_dropout(dropout) if dropout else None
    else:
        if dropout:
            drop = nn.Dropout(dropout)
        if (place := getattr(layer, "placements", {}).get("weight")) is not None:
            placements = {n: replace(place, global_shape=shape) for n, shape in shapes.items()}
    return LowRank(
        shapes,
        placements=placements,
        scale=scale,
        drop=drop,
        device=weight.device,
        dtype=dtype or (weight.dtype if weight.is_floating_point() else torch.float32),
    )
