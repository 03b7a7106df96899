"""GPTQ's rounding of one matrix: column by column, with what each rounding loses taken up by the
columns after it (Frantar et al., arXiv:2210.17323, algorithm 1).

    H = 2 / n X X^T + damping mean(diag) I        U: the upper Cholesky factor of H^-1
    for column j:   e = (w_j - Q(w_j)) / U_jj     w_k -= e U_jk for k > j

Columns go by blocks, and what is beyond a block is updated once for it. The scales of a group of
columns are found when its first one is met, from the weights as they are then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.given_numbers import check_number
from pyops.quantized.formats import Codes, Format, code_range, encode, extremes, scales_of

__all__ = ["GPTQConfig", "gptq_codes"]

BLOCK = 128  # columns


@dataclass(frozen=True)
class GPTQConfig:
    """How GPTQ rounds.

    Raises:
        ValueError: for a damping that is not above 0.
    """

    damping: float = 0.01
    """Part of the mean of H's diagonal that is added to the diagonal."""
    by_size: bool = False
    """Columns go by their diagonal of H, the largest first; the scales of groups are then those of
    the weights as they were."""

    def __post_init__(self) -> None:
        check_number(
            "damping",
            self.damping,
            lambda v: 0 < v < math.inf,
            "it must be above 0, or H may be singular",
        )


def gptq_codes(
    weight: Tensor, products: Tensor, format: Format, config: GPTQConfig | None = None
) -> Codes:
    """Codes of a weight by GPTQ, computed in float64.

    Args:
        weight: [out, in].
        products: float64 [in, in], H = 2 / n X^T X before the damping.
        format: of the weight, integers.
        config: see `GPTQConfig`; None: its defaults.

    Returns:
        Codes and scales, as of `encode`.
    """
    config = config or GPTQConfig()
    wide, h = weight.detach().double().clone(), products.clone()
    mean = float(h.diagonal().mean())
    h.diagonal().add_(config.damping * mean if mean > 0 else 1.0)
    plain = encode(weight, format)
    order = h.diagonal().argsort(descending=True, stable=True) if config.by_size else None
    if order is not None:
        wide, h = wide[:, order], h[order][:, order]
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    columns = _Columns(plain, format, order)
    _round(wide, factor, columns, _block(format))
    return columns.codes()


def _block(format: Format) -> int:
    """Columns of a block: whole groups of them."""
    group = format.group or 1
    return group * max(1, BLOCK // group)


class _Columns:
    """Codes of columns one by one, with the scales of the group that each is in."""

    def __init__(self, plain: Codes, format: Format, order: Tensor | None) -> None:
        self.format, self.order = format, order
        self.low, self.high = code_range(format)
        self.scales, self.zeros = plain.scales.clone(), plain.zero_points
        self.zeros = None if self.zeros is None else self.zeros.clone()
        self.found = torch.empty_like(plain.codes)

    def begin(self, column: int, weight: Tensor) -> None:
        """Find the scales of the group that begins with this column, if one does."""
        group = self.format.group
        if group is None or self.order is not None or column % group:
            return
        ends = extremes(weight[:, column : column + group].float(), self.format)
        scales, zeros = scales_of(*ends, self.format)
        self.scales[:, column // group] = scales[:, 0]
        if self.zeros is not None and zeros is not None:
            self.zeros[:, column // group] = zeros[:, 0]

    def round(self, column: int, w: Tensor) -> Tensor:
        """The numbers that the codes of a column [out] stand for, float64; the codes are kept."""
        place = column if self.order is None else int(self.order[column])
        at = (slice(None), place // self.format.group) if self.format.group else (slice(None),)
        s = self.scales[at]
        z = torch.zeros_like(s) if self.zeros is None else self.zeros[at].to(s.dtype)
        usable = s > 0
        ratio = torch.round(w.float() / torch.where(usable, s, 1.0))
        codes = torch.where(usable, (ratio + z).clamp(self.low, self.high), 0.0)
        self.found[:, place] = codes.to(self.found.dtype)
        return (s * (codes - z)).double()

    def codes(self) -> Codes:
        return Codes(self.found, self.scales, self.zeros, self.format, -1)


def _round(weight: Tensor, factor: Tensor, columns: _Columns, block: int) -> None:
    """Round all columns; weight [out, in] and factor [in, in] in the order of the columns."""
    width = weight.shape[1]
    for start in range(0, width, block):
        stop = min(width, start + block)
        errors = weight.new_zeros(len(weight), stop - start)
        for column in range(start, stop):
            columns.begin(column, weight)
            w = weight[:, column]
            error = (w - columns.round(column, w)) / factor[column, column]
            weight[:, column + 1 : stop] -= error.outer(factor[column, column + 1 : stop])
            errors[:, column - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
