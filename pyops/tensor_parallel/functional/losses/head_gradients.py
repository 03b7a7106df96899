"""The gradients of a linear layer before a loss, as they add up over chunks of tokens.

d logits of a chunk [n, C] --> d hidden of the chunk [n, H], summed over ranks
                           --> d weight [C, H] and d bias [C], added up in fp32
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.comm.collectives.work import Work
from pyops.deferred import accumulate_weight_gradient
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["HeadGradients", "cast_head", "check_head", "in_parameter_dtype", "scale_"]


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if (
        weight.dim() != 2
        or weight.shape[1] != hidden.shape[-1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            "hidden [..., H] needs weight [C, H] and bias [C] or None; got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and "
            f"{None if bias is None else tuple(bias.shape)}"
        )
    others = [weight] if bias is None else [weight, bias]
    cast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    if any(t.device != hidden.device or (t.dtype != hidden.dtype and not cast) for t in others):
        raise ValueError(
            f"hidden is {hidden.dtype} on {hidden.device}; weight and bias must be so too, got "
            f"{', '.join(f'{t.dtype} on {t.device}' for t in others)}"
        )


def cast_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast everything in its dtype, as torch's own linear does."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class HeadGradients:
    """The gradients of hidden, weight and bias as they add up over chunks; None for a tensor that
    requires none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        needs: tuple[bool, ...],
        *,
        ranks: Ranks,
        reduce_hidden: bool,
    ) -> None:
        self.wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self.rows, self.matrix, self.ranks = rows, weight, ranks
        self.hidden = (
            torch.empty_like(rows, memory_format=torch.contiguous_format) if needs[0] else None
        )
        self.weight, self.needs_weight = None, needs[1]
        self.bias = weight.new_zeros(len(weight), dtype=self.wide) if needs[2] else None
        self.reduce_hidden = reduce_hidden
        self.pending: tuple[Work, Tensor] | None = None

    def add(self, start: int, stop: int, dz: Tensor) -> None:
        """Adds a chunk's share, of the gradient dz [n, C] of its logits; the ranks' sum of hidden's
        is communicated while the weight's product is computed."""
        if self.hidden is not None:
            self._add_hidden(self.hidden[start:stop], dz)
        if self.needs_weight:
            self._add_weight(dz, self.rows[start:stop])
        if self.bias is not None:
            self.bias += dz.sum(0, dtype=self.bias.dtype)

    def _add_hidden(self, out: Tensor, dz: Tensor) -> None:
        if not self.reduce_hidden:
            torch.mm(dz, self.matrix, out=out)
            return
        self.finish()
        sixteen = dz.dtype in (torch.bfloat16, torch.float16)
        if sixteen and dz.is_cuda:
            product = torch.mm(dz, self.matrix, out_dtype=torch.float32)
        else:
            product = dz.float() @ self.matrix.float() if sixteen else dz @ self.matrix
        self.pending = self.ranks.sum_(product, async_op=True), out

    def _add_weight(self, dz: Tensor, rows: Tensor) -> None:
        # The first chunk's product is written, not added to zeros: 12 bytes of each weight less.
        if self.weight is None and dz.dtype == self.wide:
            self.weight = dz.t() @ rows
        elif self.weight is None and dz.is_cuda:
            self.weight = torch.mm(dz.t(), rows, out_dtype=self.wide)
        else:
            self.weight = self._zeros() if self.weight is None else self.weight
            accumulate_weight_gradient(self.weight, dz, rows)

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.matrix, dtype=self.wide, memory_format=torch.contiguous_format)

    def finish(self) -> None:
        """Waits for the sum that is pending. Without tokens, nothing was added to the weight's
        gradient: it is zero."""
        if self.needs_weight and self.weight is None:
            self.weight = self._zeros()
        if self.pending is not None:
            work, out = self.pending
            out.copy_(work.wait())
            self.pending = None


def in_parameter_dtype(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    main_grad: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients in their parameters' dtype; the weight's None where it was added to
    `main_grad`."""
    if weight is not None and main_grad is not None:
        main_grad.add_(weight)
        weight = None
    return (
        hidden,
        None if weight is None else weight.to(dtype),
        None if bias is None else bias.to(dtype),
    )


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor in fp32 at least: a loss scale may exceed what fp16 holds."""
    return torch.mul(x, factor.reshape(1), out=x) if x.dtype != factor.dtype else x.mul_(factor)
