"""LayerNorm and RMSNorm over the last dim, alone or with the residual added first, of tokens that a
rank holds.

    z = x + residual    LayerNorm: y = (z - mean z) / sqrt(var z + eps) * weight + bias
                        RMSNorm:   y = z / sqrt(mean z^2 + eps) * weight

(Ba et al., 2016; Zhang and Sennrich, 2019.)

Every rank holds the whole weight. Under sequence parallelism its gradient on a rank comes from that
rank's tokens alone: a part, as the placements say, that `sync_partial_grads` sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.ops.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(nn.Module):
    """Parameters and placements of a norm, which every rank holds whole."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        bias: bool,
        group: RanksLike,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        ranks = Ranks.of(group)
        whole = Placement.whole(
            (dim,), rank=ranks.rank, ranks=ranks.size, partial=sequence_parallel
        )
        self.placements = {"weight": whole, **({"bias": whole} if bias else {})}
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, bias={self.bias is not None}"


class LayerNorm(_Norm):
    """forward(x) -> y; forward(x, residual) -> (y, x + residual); all [..., dim].

    Args:
        dim: width of x.
        eps: added to the variance.
        bias: whether there is a bias.
        group: the ranks that hold the norm, see `RanksLike`; None: the default process group.
        sequence_parallel: whether x is this rank's tokens only.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            eps=eps,
            bias=bias,
            group=group,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return layer_norm(x, self.weight, self.bias, eps=self.eps)
        return add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps)


class RMSNorm(_Norm):
    """forward(x) -> y; forward(x, residual) -> (y, x + residual); all [..., dim].

    Args:
        dim: width of x.
        eps: added to the mean square.
        offset: x is multiplied by weight + offset (1 in Gemma).
        group: the ranks that hold the norm, see `RanksLike`; None: the default process group.
        sequence_parallel: whether x is this rank's tokens only.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.offset = offset
        super().__init__(
            dim,
            eps=eps,
            bias=False,
            group=group,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the weight so that weight + offset is 1."""
        self.weight.fill_(1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, eps=self.eps, offset=self.offset)
        return add_rms_norm(x, residual, self.weight, eps=self.eps, offset=self.offset)
