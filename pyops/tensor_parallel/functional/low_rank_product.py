"""low_rank_product: a linear layer whose weight stays as it is, and its adapter (LoRA, Hu et al.,
arXiv:2106.09685), as one autograd Function on one rank.

    forward                                backward
        y = x W^T + b                          g = scale dy B
        y += scale (x A^T) B^T                 dx = dy W,  dx += g A
                                               dA = g^T x,  dB = scale dy^T (x A^T)

One operation after the other would copy y to add to it, and would add the two parts of dx in a pass
of their own: as many bytes again as the products with A and B move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops import few_rows

__all__ = ["low_rank_product"]


def low_rank_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: tuple[Tensor, Tensor], *, scale: float
) -> Tensor:
    """x W^T + b + scale x A^T B^T, all of one dtype; W and b get no gradient.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].
        factors: A [r, in] and B [out, r].
        scale: alpha / r.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *factors)):
        return _LowRank.apply(x, weight, bias, *factors, scale)  # type: ignore[no-untyped-call,no-any-return]
    return _added(few_rows.linear(x, weight, bias), x, *factors, scale)


def _added(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    h = functional.linear(x, a).flatten(0, -2)
    y.view(-1, y.shape[-1]).addmm_(h, b.t(), alpha=scale)
    return y


class _LowRank(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        return _added(functional.linear(x, weight, bias), x, a, b, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, a, b, ctx.scale = inputs
        ctx.save_for_backward(x, weight, a, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        rows, dy = x.flatten(0, -2), dy.flatten(0, -2)
        need_x, _, _, need_a, need_b, _ = ctx.needs_input_grad
        g, dx, da, db = ctx.scale * (dy @ b), None, None, None
        if need_x:
            dx = (dy @ weight).addmm_(g, a).view(x.shape)
        if need_a:
            da = g.t() @ rows
        if need_b:
            # Its transpose: a product with few rows is faster than one with few columns.
            db = (ctx.scale * functional.linear(rows, a).t() @ dy).t()
        return dx, None, None, da, db, None
