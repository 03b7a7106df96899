"""GPTQ of a model: block by block, each calibrated with what the quantized blocks before it give.

    block 0: X -> H -> codes -> weights rounded      all examples run again, up to block 1
    block 1: X of the rounded block 0 -> H -> ...

On several ranks each rounds rows of its own. A column-parallel layer has them already; of a
row-parallel one, whose columns and inputs are cut, the inputs are gathered for H and the weight's
columns for the rounding, rows are shared out, and the codes of all rows come back, of which a rank
keeps its columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.mesh import ALONE
from pyops.quantized.calibration.inputs import (
    Batch,
    Batches,
    alike,
    check_batches,
    check_model,
    order_of,
    run,
)
from pyops.quantized.calibration.over_ranks import gathered, summed
from pyops.quantized.calibration.rounding import GPTQConfig, gptq_codes
from pyops.quantized.formats import FP8, Codes, Format, check_format, decode
from pyops.quantized.layers import (
    chosen,
    input_ranks,
    inputs_of_all,
    matrix,
    stacked,
)
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["Hessian", "RoundedLayer", "error_squares", "gptq", "gptq_layers"]


@dataclass
class Hessian:
    """The sum of x x^T over a layer's tokens, and their number."""

    products: Tensor
    """float64 [in, in]."""
    tokens: int = 0
    """How many."""

    def add(self, x: Tensor) -> None:
        """Tokens more.

        Args:
            x: [tokens, in], of all ranks' inputs.
        """
        wide = x.double()
        self.products += wide.t() @ wide
        self.tokens += len(x)

    def mean(self, ranks: Ranks) -> tuple[Tensor, int]:
        """2 / n X^T X, and n, over all ranks that had examples. Collective."""
        count = torch.tensor([self.tokens], dtype=torch.float64, device=self.products.device)
        n = int(summed(count, ranks))
        return summed(self.products, ranks) * (2 / max(1, n)), n


class RoundedLayer(NamedTuple):
    """What became of a layer."""

    codes: Codes
    """Of its weight [.., out, in] as this rank has it."""
    squares: tuple[float, float]
    """See `error_squares`."""


def error_squares(weight: Tensor, codes: Codes) -> tuple[float, float]:
    """Sums of squares of W - decoded W, and of W, of what this rank has.

    Args:
        weight: W.
        codes: of its shape.
    """
    wide = weight.float()
    lost, whole = (float(t.double().square().sum()) for t in (wide - decode(codes), wide))
    return lost, whole


def gptq(
    model: nn.Module,
    format: Format,
    batches: Batches,
    *,
    only: Sequence[str] | None = None,
    config: GPTQConfig | None = None,
    group: RanksLike = ALONE,
) -> dict[str, Codes]:
    """Round the weights of a model by GPTQ, in place: each weight becomes what its codes stand for.

    Args:
        model: in evaluation mode.
        format: of the weights: integers, with a scale for each row or group of inputs.
        batches: examples, what the model is called with.
        only: patterns of the names of layers; None: all linear layers but the head.
        config: see `GPTQConfig`; None: its defaults.
        group: ranks that have examples of their own; by default this rank alone.

    Returns:
        {name of a layer: codes of its weight [.., out, in] as this rank has it}.

    Raises:
        ValueError: for no batches, a model in training mode, fp8, weights or inputs that are not
            finite, groups that do not divide the inputs that a rank holds.
    """
    found = gptq_layers(model, format, batches, only=only, config=config, group=group)
    return {name: layer.codes for name, layer in found.items()}


@torch.no_grad()
def gptq_layers(
    model: nn.Module,
    format: Format,
    batches: Batches,
    *,
    only: Sequence[str] | None = None,
    config: GPTQConfig | None = None,
    group: RanksLike = ALONE,
) -> dict[str, RoundedLayer]:
    """As `gptq`, with what each layer lost."""
    ranks = Ranks.of(group)
    with alike(model, ranks):
        check_format("gptq: format", format)
        if config is not None and not isinstance(config, GPTQConfig):
            raise TypeError(f"gptq: config is {config!r}; give a GPTQConfig")
        if isinstance(format, FP8):
            raise ValueError(f"gptq rounds to whole numbers; got {format}. Take Int8, Int4 or IntN")
        layers, given = chosen(model, only), check_batches(batches, "gptq")
        check_model(model, layers, "gptq")
        for name, layer in layers.items():
            _check(name, layer, format)
        _check_parameters(model)
    order = order_of(model, given[0], layers)
    found: dict[str, RoundedLayer] = {}
    for block in _blocks(order):
        part = {name: layers[name] for name in block}
        for name, hessian in _hessians(model, given, part).items():
            products, tokens = hessian.mean(ranks)
            _check_inputs(name, products, tokens)
            rounded = _rounded(part[name], products, format, config)
            weight = matrix(part[name])
            squares = error_squares(weight, rounded)
            weight.copy_(decode(rounded).to(weight.dtype))
            found[name] = RoundedLayer(stacked(part[name], rounded), squares)
    return found


def _check(name: str, layer: nn.Module, format: Format) -> None:
    weight = matrix(layer)
    if not bool(torch.isfinite(weight).all()):
        row, column = (~torch.isfinite(weight)).nonzero()[0].tolist()
        raise ValueError(f"gptq: the weight of {name} is not finite at [{row}, {column}]")
    width = weight.shape[1]
    if format.group and width % format.group:
        fitting = [g for g in range(2, width + 1, 2) if width % g == 0]
        raise ValueError(
            f"gptq: {name} has {width} inputs on a rank, which groups of {format.group} do not "
            f"divide; these do: {', '.join(map(str, fitting)) or 'none'}"
        )


def _check_parameters(model: nn.Module) -> None:
    """Refuse what would come to light when some layers have been rounded already."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(
                f"gptq: {name} has a number that is not finite, and so have the inputs of the "
                "layers behind it; load an earlier checkpoint"
            )


def _check_inputs(name: str, products: Tensor, tokens: int) -> None:
    if not bool(torch.isfinite(products).all()):
        raise ValueError(f"gptq: the inputs of {name} are not all finite; look at the examples")
    if tokens < len(products):
        warnings.warn(
            f"gptq: {name} has {len(products)} inputs and was given {tokens} tokens: beyond those "
            "it rests on the damping; give more examples",
            stacklevel=3,
        )


def _blocks(order: list[str]) -> list[list[str]]:
    """Names of layers that are calibrated together: those of a block of the model, which is all up
    to the first number in a name."""
    blocks: dict[str, list[str]] = {}
    for name in order:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        # A sequence of layers alone is calibrated layer by layer
        key = name if number is None else ".".join(parts[: number + 1])
        blocks.setdefault(key, []).append(name)
    return list(blocks.values())


def _hessians(
    model: nn.Module, batches: list[Batch], layers: dict[str, nn.Module]
) -> dict[str, Hessian]:
    found: dict[str, Hessian] = {}

    def see(name: str, x: Tensor) -> None:
        layer = layers[name]
        x = gathered(x, input_ranks(layer), dim=1)[:, : inputs_of_all(layer)]
        if name not in found:
            size = x.shape[1]
            zeros = torch.zeros(size, size, dtype=torch.float64, device=x.device)
            found[name] = Hessian(zeros)
        found[name].add(x)

    run(model, batches, layers, see)
    return found


def _rounded(
    layer: nn.Module, products: Tensor, format: Format, config: GPTQConfig | None
) -> Codes:
    """Codes of what this rank holds."""
    ranks, own = input_ranks(layer), matrix(layer)
    if ranks.size == 1:
        return gptq_codes(own, products, format, config)
    width = own.shape[1]
    whole = gathered(own, ranks, dim=1)[:, : len(products)]
    rows = ranks.rows_per_rank(len(whole))
    padded = functional.pad(whole, (0, 0, 0, rows * ranks.size - len(whole)))
    part = gptq_codes(padded[ranks.start(len(whole)) :][:rows], products, format, config)

    def everyones(x: Tensor, columns: int) -> Tensor:
        """This rank's columns of all rows."""
        found = gathered(x.flatten(1) if x.dim() > 1 else x[:, None], ranks, dim=0)[: len(whole)]
        if x.dim() == 1:
            return found[:, 0]
        missing = columns * ranks.size - found.shape[1]
        return functional.pad(found, (0, missing))[:, ranks.rank * columns :][:, :columns]

    groups = width // format.group if format.group else 1
    zeros = part.zero_points
    return Codes(
        everyones(part.codes, width),
        everyones(part.scales, groups),
        None if zeros is None else everyones(zeros, groups),
        format,
        -1,
    )
