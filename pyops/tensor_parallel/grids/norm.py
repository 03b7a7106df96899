"""LayerNorm and RMSNorm of rows whose columns the ranks of a grid share.

    forward    each rank: count, mean and sum of squares about it of its own columns; gathered along
               the line and merged (Chan et al., 1979), so that a large mean costs no digits
    backward   sum dy g and sum dy g x^ of a row, added along the line
               weight and bias: added over the ranks that have other rows

(Ba et al., 2016; Zhang and Sennrich, 2019.) The statistics are fp64, two numbers for each row. A
rank keeps its block of x, and no gathered row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pyops.tensor_parallel.grids.grid import Cuts, Grid

__all__ = ["GridLayerNorm", "GridRMSNorm"]


class _GridNorm(nn.Module):
    """Parameters and placements of a norm, of which a rank has the part of its columns."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    centered = True

    def __init__(
        self,
        dim: int,
        *,
        grid: Grid,
        eps: float,
        bias: bool,
        cuts: Cuts | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim is {dim}; it must be 1 or more")
        self.dim, self.eps, self.grid = dim, eps, grid
        self.cuts = self.behind = cuts or grid.cuts
        place = grid.width_place(dim, self.cuts)
        self.placements = {"weight": place, **({"bias": place} if bias else {})}
        for name in ("weight", "bias"):
            empty = torch.empty(place.local_shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty) if name in self.placements else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0; padding is 0."""
        self.weight.zero_()
        self.placements["weight"].part(self.weight).fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y, of this rank's block x [..., dim / columns]; with a residual (y, x + residual)."""
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError(
                f"x is {list(x.shape)}, but {type(self).__name__}({self.extra_repr()}) takes "
                f"[..., {self.weight.shape[0]}], this rank's columns of {self.dim}"
            )
        z = x if residual is None else x + residual
        y: Tensor = _Norm.apply(z, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return y if residual is None else (y, z)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, bias={self.bias is not None}, {self.grid}"


class GridLayerNorm(_GridNorm):
    """y = (x - mean x) / sqrt(var x + eps) * weight + bias over whole rows.

    Args:
        dim: width of a whole row.
        grid: the ranks that share it.
        eps: added to the variance.
        bias: whether there is a bias.
        cuts: of x; None: those between the blocks of a model.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        grid: Grid,
        eps: float = 1e-5,
        bias: bool = True,
        cuts: Cuts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, grid=grid, eps=eps, bias=bias, cuts=cuts, device=device, dtype=dtype)


class GridRMSNorm(_GridNorm):
    """y = x / sqrt(mean x^2 + eps) * weight over whole rows.

    Args:
        dim: width of a whole row.
        grid: the ranks that share it.
        eps: added to the mean square.
        cuts: of x; None: those between the blocks of a model.
        device: of the parameters.
        dtype: of the parameters.
    """

    centered = False

    def __init__(
        self,
        dim: int,
        *,
        grid: Grid,
        eps: float = 1e-6,
        cuts: Cuts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, grid=grid, eps=eps, bias=False, cuts=cuts, device=device, dtype=dtype)


def _statistics(x: Tensor, layer: _GridNorm) -> tuple[Tensor, Tensor]:
    """fp64 (mean, variance) of whole rows; x: own columns, without padding."""
    line = layer.grid.line(layer.cuts.columns)
    own = x.mean(-1, dtype=torch.float64) if x.shape[-1] else x.new_zeros(x.shape[:-1]).double()
    own = own if layer.centered else torch.zeros_like(own)
    squares = _centered(x, own).square().sum(-1, dtype=torch.float64)
    rows, pending = line.start_gather(torch.stack([own, squares]))
    pending.wait()
    each = layer.weight.shape[0]
    counts = [min(max(layer.dim - p * each, 0), each) for p in range(line.size)]
    means, spreads = rows[:, 0], rows[:, 1]
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / layer.dim
    total = sum(s + n * (m - mean).square() for n, m, s in zip(counts, means, spreads, strict=True))
    return torch.as_tensor(mean), torch.as_tensor(total) / layer.dim


def _centered(x: Tensor, mean: Tensor) -> Tensor:
    """x - mean, with the digits of an fp64 mean beyond those of x."""
    if x.dtype == torch.float64:
        return x - mean[..., None]
    high = mean.to(x.dtype)
    low = (mean - high).to(x.dtype)
    return (x - high[..., None]) - low[..., None]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _GridNorm
    ) -> Tensor:
        cut = layer.grid.columns(layer.dim, layer.cuts)
        n = cut.stop - cut.start
        inner = _wide(x)[..., :n]
        mean, variance = _statistics(inner, layer)
        scale = (variance + layer.eps).rsqrt().to(inner.dtype)
        y = _centered(inner, mean) * scale[..., None] * _wide(weight)[:n]
        if bias is not None:
            y += _wide(bias)[:n]
        ctx.layer, ctx.own, ctx.has_bias = layer, n, bias is not None
        ctx.save_for_backward(x, weight, mean, scale)
        return nn.functional.pad(y, (0, cut.length - n)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        layer, n = ctx.layer, ctx.own
        grid, more = layer.grid, weight.shape[0] - ctx.own
        dy = _wide(dy)[..., :n]
        unit = _centered(_wide(x)[..., :n], mean) * scale[..., None]
        g = dy * _wide(weight)[:n]
        sums = torch.stack([g.sum(-1), (g * unit).sum(-1)])
        first, second = grid.line(layer.cuts.columns).sum(sums)[..., None]
        dx = g - unit * (second / layer.dim)
        if layer.centered:
            dx = dx - first / layer.dim
        dx = nn.functional.pad(dx * scale[..., None], (0, more)).to(x.dtype)
        flat, flat_unit = dy.reshape(-1, n), unit.reshape(-1, n)
        parts = [(flat * flat_unit).sum(0), *([flat.sum(0)] if ctx.has_bias else [])]
        total = grid.line(*layer.cuts.rows).sum(torch.stack(parts))
        total = nn.functional.pad(total, (0, more)).to(weight.dtype)
        return dx, total[0], total[1] if ctx.has_bias else None, None
