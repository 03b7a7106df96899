"""What quantization-aware training puts before a linear layer: its weight and its input as their
codes would give them back, with a derivative.

    input  --> FakeInput  --.
                             +--> the layer, in floating point
    weight --> FakeWeight --'
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.ops.layers.fake_quantize import fake_quantize
from pyops.quantized.calibration.over_ranks import greatest, least
from pyops.quantized.calibration.ranges import InputRange
from pyops.quantized.formats import Codes, Format, Int8, code_range, extremes, scales_of, to_codes
from pyops.tensor_parallel import Ranks

__all__ = [
    "FakeInput",
    "FakeWeight",
    "first_step",
    "is_rounded",
    "round_weight",
    "unround_weight",
]


def first_step(x: Tensor, format: Format) -> Tensor:
    """LSQ's first scales, 2 mean |x| / sqrt(hi), fp32 (Esser et al., 2020, section 2.1).

    Args:
        x: [rows, in].
        format: symmetric.
    """
    size, wide = x.detach().float().abs(), math.sqrt(code_range(format)[1])
    if format.per == "tensor":
        return 2 * size.mean() / wide
    if format.group is not None:
        size = size.unflatten(-1, (-1, format.group))
    return 2 * size.mean(-1) / wide


def _as_fp32(x: Tensor) -> Tensor:
    """Codes are of fp32: float64 is rounded first, as `encode` does."""
    return x.float() if x.dtype == torch.float64 else x


@dataclass(frozen=True)
class FakeWeight:
    """weight -> s clamp(round(weight / s)), of the same shape."""

    format: Format
    """Of the weight, integers."""
    transposed: bool
    """Whether the weight is [in, out]."""
    ranks: Ranks
    """Those that hold parts of a row."""
    step: nn.Parameter | None = None
    """A scale for each row or group, learned; None: from the weight as it is each time."""

    def _rows(self, weight: Tensor) -> Tensor:
        rows = weight.t() if self.transposed else weight.reshape(-1, weight.shape[-1])
        return _as_fp32(rows)

    def _scales(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.step is not None:
            return self.step.abs(), None
        lowest, highest = extremes(rows, self.format)
        if self.format.group is None:
            lowest, highest = least(lowest, self.ranks), greatest(highest, self.ranks)
        return scales_of(lowest, highest, self.format)

    def __call__(self, weight: Tensor) -> Tensor:
        """The numbers that the codes stand for.

        Args:
            weight: [out, in], stacked matrices, or [in, out].
        """
        rows = self._rows(weight)
        scale, zero = self._scales(rows)
        low, high = code_range(self.format)
        found = fake_quantize(rows, scale, zero, lo=low, hi=high, group=self.format.group)
        found = found.to(weight.dtype)
        return found.t() if self.transposed else found.view(weight.shape)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Codes:
        """The codes of a call.

        Args:
            weight: as of the call.
        """
        rows = self._rows(weight)
        return to_codes(rows, *self._scales(rows), self.format)


class FakeInput(nn.Module):
    """x -> s clamp(round(x / s)), of the same shape.

    Args:
        format: of the input: per="token", whose scales are those of the tokens that come; or
            per="tensor", one scale for all.
        ranks: those that hold parts of a token.
        group: those that have tokens of their own.
        momentum: how far a batch moves the running range of per="tensor".
    """

    low: Tensor
    high: Tensor

    def __init__(self, format: Int8, *, ranks: Ranks, group: Ranks, momentum: float = 0.01) -> None:
        super().__init__()
        self.format, self.ranks, self.group, self.momentum = format, ranks, group, momentum
        self.step: nn.Parameter | None = None
        self.limit = 0
        self.seen = 0
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    @property
    def frozen(self) -> bool:
        """Whether the range of per="tensor" stays as it is."""
        return self.seen >= self.limit

    @torch.no_grad()
    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lowest, highest = extremes(x, self.format)
        return least(lowest, self.ranks), greatest(highest, self.ranks)

    @torch.no_grad()
    def _see(self, x: Tensor) -> None:
        """Move the range by a batch."""
        lowest, highest = self._ends(x)
        lowest, highest = least(lowest, self.group), greatest(highest, self.group)
        weight = self.momentum if self.seen else 1.0
        self.low, self.high = self.low.to(lowest), self.high.to(highest)
        self.low.lerp_(lowest, weight)
        self.high.lerp_(highest, weight)
        self.seen += 1

    def range(self) -> InputRange:
        """The range of per="tensor" as it is.

        Raises:
            ValueError: before there was an input in training.
        """
        if not self.seen:
            raise ValueError(
                'inputs of per="tensor" have no range before the model has run in training mode'
            )
        if self.step is not None:
            most = self.step.detach().abs() * code_range(self.format)[1]
            return InputRange(-most, most)
        return InputRange(self.low.clone(), self.high.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The numbers that the codes stand for."""
        wide = _as_fp32(x)
        low, high = code_range(self.format)
        count = None
        if self.format.per == "token":
            scale, zero = scales_of(*self._ends(wide), self.format)
        elif self.step is not None:
            if self.training and not self.seen:
                self.step.data.copy_(first_step(wide, self.format))
                self.seen = 1
            # As the range gives it back, to the last bit
            scale, zero, count = self.step.abs() * high / high, None, x.shape[-1]
        else:
            if self.training and not self.frozen:
                self._see(wide)
            scale, zero = self.range().scale(self.format)
        result = fake_quantize(wide, scale, zero, lo=low, hi=high, count=count)
        return result.to(x.dtype)


class RoundedWeight(nn.Module):
    """What a layer in training with quantization in mind is besides its own class: its weight reads
    as its codes would give it back, and is trained, saved and loaded as what it is."""

    _fake_weight: FakeWeight

    @property
    def weight(self) -> Tensor:
        """The numbers that the codes of the weight stand for."""
        own = self._parameters["weight"]
        assert own is not None
        return self._fake_weight(own)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter itself, not what the layer computes with."""
        own = self._parameters.get(target)
        return super().get_parameter(target) if own is None else own


def round_weight(layer: nn.Module, fake: FakeWeight) -> None:
    """Let a layer compute with its weight as `fake` gives it back.

    Args:
        layer: one with a parameter `weight`.
        fake: the rounding.
    """
    own = type(layer)
    layer.__dict__["_fake_weight"] = fake
    layer.__class__ = type(f"Rounded{own.__name__}", (RoundedWeight, own), {})


def is_rounded(layer: nn.Module) -> bool:
    """Whether `round_weight` was called of the layer."""
    return isinstance(layer, RoundedWeight)


def unround_weight(layer: nn.Module) -> None:
    """Let a layer compute with its weight as it is."""
    if isinstance(layer, RoundedWeight):
        layer.__class__ = type(layer).__bases__[1]
        del layer.__dict__["_fake_weight"]
