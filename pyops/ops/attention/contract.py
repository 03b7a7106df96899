"""Attention of queries to keys without the scores in memory: the contract of its two ops.

    score[b,h,t,s] = scale q[b,t,h] . k[b,s,g(h)]                        g(h) = h // (H / G)
                     -> soft cap c tanh(score / c) -> + bias[b,h,t,s] + biases by distance
    lse[b,h,t]     = log of the sum of exp(score) over the keys seen; -inf where none is
    P              = exp(score - lse), 0 where not seen
    y[b,t,h]       = sum of keep / (1 - p) P v[b,s,g(h)];  0 where none is seen

Backward, from dy and the gradient of lse:

    delta = sum of dy y - dlse       dP = keep / (1 - p) (dy v^T)      dS = P (dP - delta)
    dq = scale dS k      dk = scale dS^T q      dv = (keep / (1 - p) P)^T dy      dbias = sum of dS

Scores are made tile by tile, forward and backward, and tiles in which nothing is seen are passed
over: FlashAttention-2 (Dao, arXiv:2307.08691). The tiles of keys come in ascending order for every
query, so results have the same bits for any number of threads, and for any part of the heads or
rows. Scores, lse and all sums are fp32 for fp32, bf16 and fp16, float64 for float64, each result
rounded once. Saved for backward: q, k, v, y, lse [B, H, T]; no mask of what was dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.attention.arguments import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.attention.checks import check_attention
from pyops.ops.attention.operands import Operands, operands_of, options_of, wide_dtype
from pyops.ops.attention.plain import is_torchs, torch_attention
from pyops.ops.attention.reference import (
    attention_backward_by_rows,
    attention_forward_by_rows,
)
from pyops.ops.library import Everywhere, define, no_second_derivative

__all__ = ["attention", "attention_with_lse"]

TENSORS = (
    "Tensor? bias, Tensor? table, Tensor? buckets, Tensor? slopes, Tensor? mask, "
    "Tensor? query_documents, Tensor? key_documents, Tensor? query_places, Tensor? key_places, "
    "Tensor? row_counts, Tensor? row_indices, Tensor? column_counts, Tensor? column_indices, "
    "Tensor? state"
)
NUMBERS = (
    "float scale, float soft_cap, bool causal, int before, int after, int block, float p, "
    "int first, int row_stride, int num_queries, int num_keys"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: AttentionMask | None = None,
    bias: Tensor | AttentionBias | None = None,
    soft_cap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Attention of queries to keys, softmax(scale q k^T + bias) v over the keys that each sees.

    Differentiable in q, k, v and the bias, once. Memory beside the result: float32 [B, H, T], and
    in backward a float32 of q's size; no tensor has T x S elements. A query that sees nothing gets
    0, and gradients of 0. On a device without a kernel a few queries at a time are computed in
    plain torch, with memory linear in T and S, slowly.

    Plain attention, hidden but by causality, goes to torch's kernel where that was measured to be
    faster (`plain_table`), and on a GPU.

    Args:
        q: [B, T, H, K] of float32, float64, bfloat16 or float16; any strides, of which the last is
            best 1. Under autocast q, k and v are cast as torch's own attention casts them.
        k: [B, S, G, K] of q's dtype, where H is a multiple of G: head h has the keys of head
            h // (H / G).
        v: [B, S, G, K] of q's dtype.
        scale: factor of the scores, not 0; None: 1 / sqrt(K).
        mask: which keys a query sees; None: all.
        bias: added to the scores; a tensor is `AttentionBias(scores=...)`.
        soft_cap: c of c tanh(score / c), which bounds the scores before the bias (Gemma 2,
            arXiv:2408.00118, section 2); None: none.
        dropout: of the weights, after the softmax; None: none.

    Returns:
        [B, T, H, K] in q's dtype, contiguous.

    Raises:
        ValueError: for shapes that don't fit and numbers out of range.
        TypeError: for other dtypes.
    """
    given = _prepared(q, k, v, scale, mask, bias, soft_cap, dropout)
    q, k, v, mask, bias, scale = given
    if is_torchs(q, k, mask, bias, dropout, soft_cap):
        return torch_attention(q, k, v, scale=scale, causal=mask.causal)
    return _run(*given, soft_cap, dropout)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: AttentionMask | None = None,
    bias: Tensor | AttentionBias | None = None,
    soft_cap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the logarithm of the sum of each query's exponentials, by which parts of the
    keys are merged (`merge`). Differentiable in both.

    Args:
        q, k, v, scale, mask, bias, soft_cap, dropout: as for `attention`.

    Returns:
        y [B, T, H, K] in q's dtype and lse [B, H, T], float32, or float64 for float64; -inf for a
        query that sees nothing. Dropout does not change lse.

    Raises:
        ValueError: for shapes that don't fit and numbers out of range.
        TypeError: for other dtypes.
    """
    given = _prepared(q, k, v, scale, mask, bias, soft_cap, dropout)
    return _run(*given, soft_cap, dropout)


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    mask: AttentionMask | None,
    bias: Tensor | AttentionBias | None,
    soft_cap: float | None,
    dropout: AttentionDropout | None,
) -> tuple[Tensor, Tensor, Tensor, AttentionMask, AttentionBias, float]:
    """q, k, v, mask, bias and scale, none of them left open, checked."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k, v))
    mask = AttentionMask() if mask is None else mask
    if not isinstance(bias, AttentionBias):
        bias = AttentionBias(scores=bias)
    scale = scale if scale is not None else max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0
    check_attention(q, k, v, mask, bias, dropout, scale=scale, soft_cap=soft_cap)
    return q, k, v, mask, bias, scale


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    bias: AttentionBias,
    scale: float,
    soft_cap: float | None,
    dropout: AttentionDropout | None,
) -> tuple[Tensor, Tensor]:
    operands = operands_of(q, k, mask, bias, dropout)
    options = options_of(q, k, mask, dropout, scale=scale, soft_cap=soft_cap)
    result: tuple[Tensor, Tensor] = torch.ops.pyops.attention_forward.default(
        q, k, v, *operands, **options._asdict()
    )
    return result


def _fake(
    q: Tensor, k: Tensor, v: Tensor, *operands: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    lse = q.new_empty((B, H, T), dtype=wide_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _fake_backward(
    dy: Tensor,
    dlse: Tensor | None,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *operands: Tensor | None,
    bias_grad: bool,
    table_grad: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = Operands(*operands)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbias, dtable = dy.new_empty(0), dy.new_empty(0, dtype=wide_dtype(q.dtype))
    if bias_grad and tensors.bias is not None:
        dbias = tensors.bias.new_empty(tensors.bias.shape)
    if table_grad and tensors.table is not None:
        dtable = tensors.table.new_empty(tensors.table.shape)
    return dq, dk, dv, dbias, dtable


def _save(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(*output, *inputs)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    y, lse, q, k, v, *operands = ctx.saved_tensors
    bias_grad, table_grad = ctx.needs_input_grad[3:5]
    dq, dk, dv, dbias, dtable = torch.ops.pyops.attention_backward.default(
        torch.zeros_like(y) if dy is None else dy,
        dlse,
        y,
        lse,
        q,
        k,
        v,
        *operands,
        bias_grad=bias_grad,
        table_grad=table_grad,
        **ctx.options,
    )
    found = (dq, dk, dv, dbias if bias_grad else None, dtable if table_grad else None)
    return *found, *(None,) * (len(Operands._fields) - 2)


def _products(q: Any, k: Any, count: int) -> int:
    """Multiplications and additions of `count` products of T x S x K, the masked part included, as
    torch counts its own attention."""
    B, T, H, K = q
    return 2 * count * int(B * H * T * k[1] * K)


def _forward_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    return _products(q, k, 2)


def _backward_flops(
    dy: Any, dlse: Any, y: Any, lse: Any, q: Any, k: Any, *_: Any, **__: Any
) -> int:
    return _products(q, k, 5)


define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {TENSORS}, *, {NUMBERS}) -> (Tensor, Tensor)",
    reference=Everywhere(attention_forward_by_rows),
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    triton="attention",
    flops=_forward_flops,
)
define(
    "attention_backward(Tensor dy, Tensor? dlse, Tensor y, Tensor lse, Tensor q, Tensor k, Tensor v"
    f", {TENSORS}, *, {NUMBERS}, bool bias_grad, bool table_grad) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor)",
    reference=Everywhere(attention_backward_by_rows),
    fake=_fake_backward,
    backward=no_second_derivative,
    triton="attention",
    flops=_backward_flops,
)
