"""The matrix products of a shared linear layer as autograd Functions, each collective beside a
product that does not need it.

    column, forward              backward
        x (gathered)                 gather x (sp)  |  dx = dy W
        y = x W^T + b                sum dx         |  dW = dy^T x, db
    row, forward                 backward
        p = x W^T                    gather dy (sp)
        y = sum p + b                dx = dy W, dW = dy^T x, db

(sp): under sequence parallelism only, where the sums are reduce_scatters.

What stands right of the bar is computed while what stands left of it is on its way: on a thread for
CPU tensors, on a CUDA stream of its own with events for CUDA ones. Without `overlap` the same calls
follow one another, with the same bits. Groups of GPUs with symmetric memory fuse large products
with their collective instead (see symmetric.py).

A sum over ranks of 16-bit numbers is a sum of roundings, and the error grows with the ranks. By
default the parts therefore leave the product in fp32, travel so, and are rounded once; "native"
sends 16-bit parts, half the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.comm.collectives.work import Work
from pyops.deferred import is_marked, weight_gradient
from pyops.ops import few_rows
from pyops.tensor_parallel.functional import symmetric
from pyops.tensor_parallel.functional.ranks import Ranks, pad_rows

__all__ = ["ProductPlan", "autocast_together", "column_products", "row_product"]

REDUCE = ("fp32", "native")


@dataclass(frozen=True)
class ProductPlan:
    """How a layer's products are shared out.

    Attributes:
        reduce: "fp32" or "native".
    """

    ranks: Ranks
    sequence_parallel: bool = False
    reduce: str = "fp32"
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.reduce not in REDUCE:
            raise ValueError(f"reduce is {self.reduce!r}; choose one of {', '.join(REDUCE)}")

    def sums_as_is(self, x: Tensor) -> bool:
        """Whether parts of a sum over ranks travel in the dtype of x."""
        return self.reduce == "native" or x.dtype not in (torch.bfloat16, torch.float16)


def column_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], plan: ProductPlan
) -> tuple[Tensor, ...]:
    """x W^T + b for each weight [.., in], its leading dims flattened: one gather of x and one sum
    of dx for all of them.

    Args:
        x: [..., in], the same on every rank, or this rank's token rows [n, in] under sequence
            parallelism. The results are [..., out], or [ranks * n, out].
    """
    x, *both = autocast_together(x, *weights, *biases)
    weights, biases = both[: len(weights)], both[len(weights) :]
    # Without sequence parallelism nothing is exchanged on the way forward.
    alone = plan.ranks.size == 1 and not any(map(is_marked, weights))
    if alone or not (torch.is_grad_enabled() or plan.sequence_parallel):
        return tuple(
            few_rows.linear(x, _matrix(w), _vector(b)) for w, b in zip(weights, biases, strict=True)
        )
    return _Column.apply(plan, x, *weights, *biases)  # type: ignore[no-untyped-call,no-any-return]


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: ProductPlan,
    *,
    more: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The ranks' sum of x W^T, and then + b.

    The result is [..., out] on every rank; under sequence parallelism x is [N, in / ranks] and the
    result this rank's [n, out] of the N tokens, padded.

    Args:
        x: [..., in / ranks], weight [out, in / ranks].
        more: h [..., r] and B [out, r], of which h B^T is added to this rank's x W^T.
    """
    h, b = more or (None, None)
    x, weight, bias, h, b = autocast_together(x, weight, bias, h, b)
    if plan.ranks.size == 1 and not is_marked(weight):
        y = few_rows.linear(x, weight, bias)
        if h is None or b is None:
            return y
        return torch.addmm(y.flatten(0, -2), h.flatten(0, -2), b.t()).view(y.shape)
    return _Row.apply(plan, x, weight, bias, h, b)  # type: ignore[no-untyped-call,no-any-return]


def autocast_together(x: Tensor, *parameters: Tensor | None) -> Any:
    """Under autocast everything in its dtype, as torch's own linear does.

    But parameters that carry a mark, which their copy would not: the Functions cast those.
    """
    dtype = _autocast_dtype(x)
    if dtype is None:
        return x, *parameters
    return x.to(dtype), *(p if p is None or is_marked(p) else p.to(dtype) for p in parameters)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _to(parameter: Any, dtype: torch.dtype | None) -> Any:
    return parameter if parameter is None or dtype is None else parameter.to(dtype)


def _marked(parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Those that carry a mark, for backward: what it unpacks may be an alias without it."""
    return [p if is_marked(p) else None for p in parameters]


def _matrix(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight.flatten(0, -2)


def _vector(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dim() == 1 else bias.flatten()


def _part_of_sum(a: Tensor, b: Tensor, plan: ProductPlan) -> Tensor:
    """a b, in the dtype in which it is summed over ranks. a: [rows, k], b: [k, columns]."""
    if plan.sums_as_is(a) or plan.ranks.size == 1:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _bias_gradient(marked: Tensor | None, weight: Tensor, dy: Tensor) -> Tensor | None:
    return (
        dy.sum(0).view(weight.shape[:-1]) if marked is None else weight_gradient(marked, dy, None)
    )


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ProductPlan, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        n, dtype = len(rest) // 2, _autocast_dtype(x)
        ctx.plan, ctx.shape, ctx.dtype, ctx.marked = plan, x.shape, x.dtype, _marked(rest)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2 : 2 + n]) else None, *rest[:n])
        cast = [_to(p, dtype) for p in rest]
        weights, biases = [_matrix(w) for w in cast[:n]], [_vector(b) for b in cast[n:]]
        with torch.autocast(x.device.type, enabled=False):
            if plan.sequence_parallel and symmetric.fuses(
                x, plan.ranks, rows=len(x) * plan.ranks.size
            ):
                _, products = symmetric.gathered_products(
                    x.contiguous(), [w.t() for w in weights], plan.ranks
                )
                return tuple(
                    y if b is None else y.add_(b) for y, b in zip(products, biases, strict=True)
                )
            whole = plan.ranks.gather(x.contiguous()).wait() if plan.sequence_parallel else x
            return tuple(
                functional.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)
            )

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        plan, n = ctx.plan, len(weights)
        need_x, need_w, need_b = (
            ctx.needs_input_grad[1],
            ctx.needs_input_grad[2 : 2 + n],
            ctx.needs_input_grad[2 + n :],
        )
        rows = [_rows(dy) for dy in dys]
        shared = plan.sequence_parallel
        gathering = (
            plan.ranks.gather(x.contiguous(), async_op=plan.overlap)
            if shared and any(need_w)
            else None
        )
        fused = need_x and shared and n == 1 and plan.sums_as_is(rows[0])
        fused = fused and symmetric.fuses(rows[0], plan.ranks, rows=len(rows[0]))
        if fused:
            dx = symmetric.scattered_product(rows[0], _matrix(weights[0]).to(ctx.dtype), plan.ranks)
        elif need_x:
            dx = _part_of_sum(rows[0], _matrix(weights[0]).to(ctx.dtype), plan)
            for dy, weight in zip(rows[1:], weights[1:], strict=True):
                dx += _part_of_sum(dy, _matrix(weight).to(ctx.dtype), plan)
        whole = gathering.wait() if gathering is not None else None if x is None else _rows(x)
        summing = None
        if fused:
            summing = Work(dx)
        elif need_x:
            summing = (plan.ranks.reduce_scatter if shared else plan.ranks.sum_)(
                dx, async_op=plan.overlap
            )
        given = list(
            zip(weights, rows, ctx.marked[:n], ctx.marked[n:], need_w, need_b, strict=True)
        )
        dws = [
            weight_gradient(w if own is None else own, dy, whole) if need else None
            for w, dy, own, _, need, _ in given
        ]
        dbs = [_bias_gradient(own, w, dy) if need else None for w, dy, _, own, _, need in given]
        found = summing.wait().to(ctx.dtype).view(ctx.shape) if summing is not None else None
        return None, found, *dws, *dbs


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: ProductPlan,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        h: Tensor | None = None,
        b: Tensor | None = None,
    ) -> Tensor:
        dtype = _autocast_dtype(x)
        ctx.plan, ctx.shape, ctx.marked = plan, x.shape, _marked((weight, bias))
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight, h, b)
        rows, ranks = _rows(x), plan.ranks
        fused = (
            plan.sequence_parallel
            and h is None
            and plan.sums_as_is(rows)
            and symmetric.fuses(rows, ranks, rows=len(rows))
        )
        shape: tuple[int, ...] = (-1, weight.shape[0])
        with torch.autocast(x.device.type, enabled=False):
            matrix = _to(weight, dtype).t()
            if fused:
                y = symmetric.scattered_product(rows, matrix, ranks)
            else:
                part = _part_of_sum(rows, matrix, plan)
                if h is not None and b is not None:
                    part += _part_of_sum(_rows(h), _to(b, dtype).t(), plan)
                if plan.sequence_parallel:
                    padded = pad_rows(part, ranks.rows_per_rank(len(part)) * ranks.size)
                    y = ranks.reduce_scatter(padded).wait()
                else:
                    y = ranks.sum_(part).wait()
                    shape = (*x.shape[:-1], weight.shape[0])
        if bias is not None:
            y += _to(bias, dtype)
        # Not a view to autograd, so that it may be added to in place, as Falcon's blocks do.
        result: Tensor = torch.ops.aten._unsafe_view(y.to(x.dtype), shape)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, h, b = ctx.saved_tensors
        plan, (own, own_bias) = ctx.plan, ctx.marked
        _, need_x, need_w, need_b, *_ = ctx.needs_input_grad
        rows, dx = _rows(dy), None
        if plan.sequence_parallel:
            tokens = ctx.shape[:-1].numel()
            if need_x and symmetric.fuses(rows, plan.ranks, rows=len(rows) * plan.ranks.size):
                rows, (dx,) = symmetric.gathered_products(
                    rows.contiguous(), [weight.to(rows.dtype)], plan.ranks
                )
                rows, dx = rows[:tokens], dx[:tokens].view(ctx.shape)
            else:
                rows = plan.ranks.gather(rows.contiguous()).wait()[:tokens]
        # From the gathered rows the bias gets its whole gradient on every rank, rounded once.
        db = _bias_gradient(own_bias, weight, rows) if need_b else None
        if need_x and dx is None:
            dx = (rows @ weight.to(rows.dtype)).view(ctx.shape)
        dw = weight_gradient(weight if own is None else own, rows, _rows(x)) if need_w else None
        if h is None:
            return None, dx, dw, db, None, None
        dh = (rows @ b.to(rows.dtype)).view(h.shape) if ctx.needs_input_grad[4] else None
        return None, dx, dw, db, dh, rows.t() @ _rows(h) if ctx.needs_input_grad[5] else None
