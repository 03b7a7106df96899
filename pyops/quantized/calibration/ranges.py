"""Ranges of the inputs of linear layers, found from examples: for activations of `per="tensor"`.

    batches --> model --> input of each layer --> least and greatest of each batch, histogram
                                                   --> one range, and so one scale

| method | the range |
|---|---|
| "minmax" | the least and the greatest of all batches |
| "mean" | a running mean of each batch's, moved by `momentum` |
| "percentile" | what `percentile` of a hundred numbers do not exceed |
| "squared" | the hundredths of the greatest with the least squared error |
| "entropy" | the part of the greatest with the least KL divergence (Migacz, 2017) |
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.given_numbers import check_number
from pyops.mesh import ALONE
from pyops.quantized.calibration.histogram import Histogram
from pyops.quantized.calibration.inputs import (
    Batches,
    alike,
    check_batches,
    check_model,
    run,
)
from pyops.quantized.calibration.over_ranks import greatest, least
from pyops.quantized.formats import Format, Int8, check_format, code_range, scales_of
from pyops.quantized.layers import chosen, input_ranks
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["METHODS", "Calibration", "InputRange", "calibrate"]

METHODS = ("minmax", "mean", "percentile", "squared", "entropy")


@dataclass(frozen=True)
class Calibration:
    """How ranges are found.

    Raises:
        ValueError: where a field has no sense, naming it and its value.
    """

    method: str = "minmax"
    """One of "minmax", "mean", "percentile", "squared", "entropy"."""
    percentile: float = 99.9
    """Of "percentile": 99.9 or 99.99; of an asymmetric format the same part is cut off at both
    ends."""
    momentum: float = 0.01
    """Of "mean": how far a batch moves the range."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        check_number(
            "percentile",
            self.percentile,
            lambda v: 50 < v <= 100,
            "it is above 50 and at most 100",
        )
        check_number("momentum", self.momentum, lambda v: 0 < v <= 1, "it is above 0 and at most 1")


class InputRange(NamedTuple):
    """What a layer's input is taken to lie within, as `convert` takes it."""

    lowest: Tensor
    """fp32 [], at most 0."""
    highest: Tensor
    """fp32 [], at least 0."""

    def scale(self, format: Format) -> tuple[Tensor, Tensor | None]:
        """The scale, and for asymmetric formats the zero point.

        Args:
            format: of the input.
        """
        return scales_of(self.lowest, self.highest, format)


class Ranges:
    """What the inputs of one layer were: a histogram, and the ends of each batch.

    Args:
        device: where it is counted.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.histogram = Histogram(device)
        self.ends: list[tuple[Tensor, Tensor]] = []

    def update(self, x: Tensor) -> None:
        """Count a batch's numbers.

        Args:
            x: [tokens, in].
        """
        ends = torch.aminmax(x.detach().float()) if x.numel() else (x.new_zeros(()),) * 2
        self.histogram.update(x)
        self.ends.append((ends[0], ends[1]))

    def reduce(self, ranks: Ranks) -> None:
        """Put together what ranks have seen of as many batches. Collective."""
        self.histogram.reduce(ranks)
        lows, highs = (torch.stack(ends) for ends in zip(*self.ends, strict=True))
        lows, highs = least(lows, ranks), greatest(highs, ranks)
        self.ends = list(zip(lows.unbind(), highs.unbind(), strict=True))

    def found(self, format: Int8, how: Calibration) -> tuple[float, float]:
        """The range, as `scales_of` takes it."""
        histogram = self.histogram
        if how.method == "mean":
            return self._mean(format, how.momentum)
        if how.method == "percentile" and len(histogram):
            part = how.percentile / 100
            if format.symmetric:
                most = histogram.magnitude_quantile(part)
                return -most, most
            return min(0.0, histogram.quantile(1 - part)), max(0.0, histogram.quantile(part))
        if how.method == "squared":
            return histogram.range(format, histogram.clip_of_least_error(format))
        if how.method == "entropy" and histogram.magnitude() > 0:
            levels = code_range(format)[1] + 1 if format.symmetric else code_range(format)[1] // 2
            return histogram.range(format, histogram.clip_of_least_divergence(levels))
        return histogram.range(format)

    def _mean(self, format: Int8, momentum: float) -> tuple[float, float]:
        low, high = (float(end) for end in self.ends[0])
        for lowest, highest in self.ends[1:]:
            low += momentum * (float(lowest) - low)
            high += momentum * (float(highest) - high)
        low, high = min(low, 0.0), max(high, 0.0)
        if format.symmetric:
            return -max(high, -low), max(high, -low)
        return low, high


def calibrate(
    model: nn.Module,
    batches: Batches,
    *,
    format: Int8 = Int8(per="tensor"),  # noqa: B008 - frozen
    only: Sequence[str] | None = None,
    how: Calibration | None = None,
    group: RanksLike = ALONE,
) -> dict[str, InputRange]:
    """The ranges of the inputs of a model's linear layers, from examples. The same on any number of
    ranks that share the examples out, as many batches each, or the layers' inputs.

    Args:
        model: in evaluation mode.
        batches: examples, what the model is called with: tensors, or mappings of its arguments.
        format: of the inputs, `Int8(per="tensor")`.
        only: patterns of the names of layers; None: all linear layers but the head.
        how: see `Calibration`; None: "minmax".
        group: ranks that have examples of their own; by default this rank alone.

    Returns:
        {name of a layer: its input's range}.

    Raises:
        ValueError: for no batches, a model in training mode, a format that is not per tensor, an
            input that is not finite (with the layer's name).
    """
    how, ranks = Calibration() if how is None else how, Ranks.of(group)
    with alike(model, ranks):
        check_format("calibrate: format", format)
        if not isinstance(how, Calibration):
            raise TypeError(f"calibrate: how is {how!r}; give a Calibration")
        if format.per != "tensor":
            raise ValueError(
                f'calibrate is for one scale of all inputs; got {format}. per="token" finds its '
                "scales when the tokens come"
            )
        layers, given = chosen(model, only), check_batches(batches, "calibrate")
        check_model(model, layers, "calibrate")
    counts = gather(len(given), group=ranks.group)
    if len(set(counts)) > 1:
        raise ValueError(f"calibrate: the ranks have {counts} batches; give each as many")
    seen: dict[str, Ranges] = {}
    errors: list[ValueError] = []

    def see(name: str, x: Tensor) -> None:
        try:
            seen.setdefault(name, Ranges(x.device)).update(x)
        except ValueError as error:
            errors.append(ValueError(f"calibrate: the input of {name}: {error}"))

    run(model, given, layers, see)
    with alike(model, ranks):
        if errors:
            raise errors[0]
    found = {}
    for name, layer in layers.items():
        ranges = seen[name]
        for shared in (input_ranks(layer), ranks):
            ranges.reduce(shared)
        device = ranges.histogram.counts.device
        low, high = ranges.found(format, how)
        found[name] = InputRange(*(torch.tensor(end, device=device) for end in (low, high)))
        if not high - low > 0:
            warnings.warn(
                f"calibrate: the input of {name} was 0 in all examples: its scale is 0, and the "
                "layer will give its bias; were these the right examples?",
                stacklevel=2,
            )
    return found
