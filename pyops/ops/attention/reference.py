"""The meaning of the attention ops in plain torch, with explicit scores and explicit gradients; and
the same for a few queries at a time, for devices without a kernel.

    scores of     k0 k1 k2 k3
    q0 q1          .  .  .  .    --> y, lse and dq of q0 q1       memory is that of one such part,
    q2 q3          .  .  .  .    --> y, lse and dq of q2 q3       and grows with the number of keys
                   `--`--`--`----> dk, dv, dbias: added up in wide numbers, rounded once
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyops.ops.attention.operands import Operands, Options, wide_dtype
from pyops.ops.random import philox_words

__all__ = [
    "attention_backward_by_rows",
    "attention_backward_reference",
    "attention_forward_by_rows",
    "attention_forward_reference",
    "kept_weights",
    "visible",
]

PART = 1 << 24  # scores that are made at a time, where a block of queries has not more


def attention_forward_reference(
    q: Tensor, k: Tensor, v: Tensor, *operands: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, K] in q's dtype and lse [B, H, T], float32, or float64 for float64, without their
    derivative.

    Args:
        q: [B, T, H, K].
        k: [B, S, G, K].
        v: [B, S, G, K].
        operands: as in `Operands`.
        options: as in `Options`.
    """
    # Products are wide here, whatever autocast would make of them
    with torch.autocast(q.device.type, enabled=False):
        return _forward(q, k, v, Operands(*operands), Options(**options))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: Operands, numbers: Options
) -> tuple[Tensor, Tensor]:
    scores, seen, _ = _scores(q, k, tensors, numbers)
    wide = scores.dtype
    lse = scores.logsumexp(dim=-1) if k.shape[1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = _weights(scores, seen, lse)
    kept = _drop(weights, _kept(q, k, tensors, numbers), numbers.p)
    y = _product(kept, seen, _of_queries(v, q).to(wide))
    return y.transpose(1, 2).to(q.dtype).contiguous(), lse


def attention_backward_reference(
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
    """dq, dk, dv in their dtypes; dbias of the bias's shape and dtype and dtable of the table's, or
    [0].

        delta = sum of dy y - dlse     dP = M (dy v^T)     dS = P (dP - delta)
        dq = scale dS k                dk = scale dS^T q   dv = (M P)^T dy

    Args:
        dy: [B, T, H, K].
        dlse: [B, H, T] or None.
        y: of the forward op.
        lse: of the forward op.
        q: [B, T, H, K].
        k: [B, S, G, K].
        v: [B, S, G, K].
        operands: as in `Operands`.
        bias_grad: whether dbias is wanted.
        table_grad: whether dtable is wanted.
        options: as in `Options`.
    """
    tensors, numbers = Operands(*operands), Options(**options)
    scores, seen, slope = _scores(q, k, tensors, numbers)
    wide = scores.dtype
    weights = _weights(scores, seen, lse)
    mask = _kept(q, k, tensors, numbers)
    kept = _drop(weights, mask, numbers.p)
    wide_dy = dy.transpose(1, 2).to(wide)
    delta = (wide_dy * y.transpose(1, 2).to(wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    dp = wide_dy @ _of_queries(v, q).to(wide).transpose(-1, -2)
    ds = torch.where(seen, weights * (_drop(dp, mask, numbers.p) - delta[..., None]), 0.0)
    dbias, dtable = dy.new_empty(0), dy.new_empty(0, dtype=wide)
    if bias_grad and tensors.bias is not None:
        dbias = ds.sum_to_size(tensors.bias.shape).to(tensors.bias.dtype)
    if table_grad and tensors.table is not None and tensors.buckets is not None:
        dtable = _table_gradient(ds, q, k, tensors)
    raw = (ds if slope is None else ds * slope) * numbers.scale
    dq = _product(raw, seen, _of_queries(k, q).to(wide))
    turned = seen.transpose(-1, -2)
    dk = _product(raw.transpose(-1, -2), turned, q.transpose(1, 2).to(wide))
    dv = _product(kept.transpose(-1, -2), turned, wide_dy)
    dk, dv = (_sum_of_group(x, k.shape[2]).transpose(1, 2) for x in (dk, dv))
    dq, dk, dv = (
        x.to(like.dtype).contiguous()
        for x, like in zip((dq.transpose(1, 2), dk, dv), (q, k, v), strict=True)
    )
    return dq, dk, dv, dbias, dtable


def attention_forward_by_rows(
    q: Tensor, k: Tensor, v: Tensor, *operands: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """As `attention_forward_reference`, which has the same arguments, in parts of the queries."""
    parts = list(_parts(q, k, Operands(*operands), Options(**options).block))
    found = [attention_forward_reference(q[:, part], k, v, *own, **options) for part, own in parts]
    if len(found) == 1:
        return found[0]
    ys, lses = zip(*found, strict=True)
    return torch.cat(ys, dim=1), torch.cat(lses, dim=2)


def attention_backward_by_rows(
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
    """As `attention_backward_reference`, which has the same arguments, in parts of the queries."""
    wide, tensors = wide_dtype(q.dtype), Operands(*operands)
    wide_k, wide_v = k.to(wide), v.to(wide)
    bias_dtype = wide if tensors.bias is None else tensors.bias.dtype
    shared = tensors.bias is not None and tensors.bias.shape[2] == 1
    each: list[tuple[Tensor, Tensor]] = []  # dq, and dbias where queries have each their own
    total: list[Tensor] = []
    for part, own in _parts(q, k, tensors, Options(**options).block):
        dq, dk, dv, dbias, dtable = attention_backward_reference(
            dy[:, part].to(wide),
            None if dlse is None else dlse[:, :, part],
            y[:, part].to(wide),
            lse[:, :, part],
            q[:, part].to(wide),
            wide_k,
            wide_v,
            *own._replace(bias=None if own.bias is None else own.bias.to(wide)),
            bias_grad=bias_grad,
            table_grad=table_grad,
            **options,
        )
        each.append((dq.to(q.dtype), dbias.to(wide if shared else bias_dtype)))
        summed = [dk, dv, dtable, *([dbias] if shared else [])]
        total = [a.add_(b) for a, b in zip(total, summed, strict=True)] if total else summed
    dk, dv, dtable, *rest = total
    dbias = dy.new_empty(0)
    if bias_grad and tensors.bias is not None:
        whole = rest[0] if shared else torch.cat([found for _, found in each], dim=2)
        dbias = whole.to(bias_dtype)
    dq = torch.cat([found for found, _ in each], dim=1)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias, dtable


def _parts(q: Tensor, k: Tensor, tensors: Operands, block: int) -> Iterator[tuple[slice, Operands]]:
    """Queries whose scores are made together, whole blocks of a layout; and what concerns them."""
    B, T, H, _ = q.shape
    unit = block or 1
    size = max(PART // max(B * H * k.shape[1], 1) // unit, 1) * unit
    places, _ = places_of(q, k, tensors)
    for first in range(0, max(T, 1), size):
        part, blocks = slice(first, first + size), slice(first // unit, (first + size) // unit)
        bias, documents, counts, indices = (
            tensors.bias,
            tensors.query_documents,
            tensors.row_counts,
            tensors.row_indices,
        )
        yield (
            part,
            tensors._replace(
                bias=bias if bias is None or bias.shape[2] == 1 else bias[:, :, part],
                query_documents=None if documents is None else documents[:, part],
                query_places=places[part],
                row_counts=None if counts is None else counts[:, blocks],
                row_indices=None if indices is None else indices[:, blocks],
            ),
        )


def visible(q: Tensor, k: Tensor, tensors: Operands, numbers: Options) -> Tensor:
    """bool [1 or B, 1 or H, T, S]: which keys each query sees."""
    query, key = places_of(q, k, tensors)
    distance = key - query[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if numbers.causal:
        seen &= distance <= 0
    if numbers.before >= 0:
        seen &= distance >= -numbers.before
    if numbers.after >= 0:
        seen &= distance <= numbers.after
    seen = seen[None, None]
    if tensors.mask is not None:
        seen = seen & tensors.mask[:, None, None]
    if tensors.query_documents is not None and tensors.key_documents is not None:
        own, other = tensors.query_documents[:, None, :, None], tensors.key_documents[:, None, None]
        seen = seen & (own == other) & (own >= 0)
    if tensors.row_counts is not None and tensors.row_indices is not None:
        blocks = _listed(tensors.row_counts, tensors.row_indices, -(-k.shape[1] // numbers.block))
        rows = blocks.repeat_interleave(numbers.block, dim=1)[:, : q.shape[1]]
        seen = seen & rows.repeat_interleave(numbers.block, dim=2)[:, :, : k.shape[1]]
    return seen


def kept_weights(q: Tensor, k: Tensor, tensors: Operands, numbers: Options) -> Tensor:
    """bool [B, H, T, S]: which weights dropout keeps."""
    assert tensors.state is not None
    key, offset = tensors.state.tolist()
    query_place, key_place = places_of(q, k, tensors)
    rows = torch.arange(q.shape[0], device=q.device) * numbers.row_stride + offset + numbers.first
    heads = torch.arange(q.shape[2], device=q.device) * numbers.num_queries
    index = (heads[:, None] + query_place)[..., None] * numbers.num_keys + key_place
    index = rows[:, None, None, None] + index
    words = philox_words(index >> 2, key=key).gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    uniform = (words >> 8).to(torch.float32) * 2.0**-24
    return uniform >= torch.tensor(numbers.p, dtype=torch.float32, device=q.device)


def places_of(q: Tensor, k: Tensor, tensors: Operands) -> tuple[Tensor, Tensor]:
    """int64 [T] and [S], the places of queries and keys."""
    query, key = tensors.query_places, tensors.key_places
    return (
        torch.arange(q.shape[1], device=q.device) if query is None else query,
        torch.arange(k.shape[1], device=q.device) if key is None else key,
    )


def _kept(q: Tensor, k: Tensor, tensors: Operands, numbers: Options) -> Tensor | None:
    return kept_weights(q, k, tensors, numbers) if tensors.state is not None else None


def _drop(x: Tensor, kept: Tensor | None, p: float) -> Tensor:
    return x if kept is None else torch.where(kept, x * (1.0 / (1.0 - p)), 0.0)


def _scores(
    q: Tensor, k: Tensor, tensors: Operands, numbers: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """wide [B, H, T, S], -inf where nothing is seen; what is seen; and the derivative of the soft
    cap, None without one."""
    wide = wide_dtype(q.dtype)
    seen = visible(q, k, tensors, numbers)
    scores = (q.transpose(1, 2).to(wide) * numbers.scale) @ _of_queries(k, q).to(wide).mT
    slope = None
    if numbers.soft_cap:
        bent = (scores / numbers.soft_cap).tanh()
        scores, slope = numbers.soft_cap * bent, 1.0 - bent * bent
    if tensors.bias is not None:
        scores = scores + tensors.bias.to(wide)
    if tensors.table is not None and tensors.buckets is not None:
        scores = scores + tensors.table.t()[:, _bucket(q, k, tensors)]
    if tensors.slopes is not None:
        query, key = places_of(q, k, tensors)
        away = (key - query[:, None]).abs().to(wide)
        scores = scores - tensors.slopes[:, None, None] * away
    return scores.masked_fill(~seen, -torch.inf), seen, slope


def _weights(scores: Tensor, seen: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), 0 where nothing is seen."""
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.where(seen, weights, 0.0)


def _product(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """weights @ values, where a value that is not seen counts for nothing, be it nan."""
    if bool(values.isfinite().all()):
        return weights @ values
    each = weights[..., None] * values[..., None, :, :]
    return torch.where(seen[..., None], each, 0.0).sum(-2)


def _of_queries(x: Tensor, q: Tensor) -> Tensor:
    """x [B, S, G, K] as [B, H, S, K]: each head of q has that of its group."""
    return x.transpose(1, 2).repeat_interleave(q.shape[2] // max(x.shape[2], 1), dim=1)


def _sum_of_group(x: Tensor, groups: int) -> Tensor:
    total: Tensor = x.unflatten(1, (groups, -1)).sum(2)
    return total


def _bucket(q: Tensor, k: Tensor, tensors: Operands) -> Tensor:
    """int64 [T, S]: the row of the table for each pair."""
    assert tensors.buckets is not None
    query, key = places_of(q, k, tensors)
    reach = tensors.buckets.numel() // 2
    bucket: Tensor = tensors.buckets[(key - query[:, None]).clamp(-reach, reach) + reach]
    return bucket.long()


def _table_gradient(ds: Tensor, q: Tensor, k: Tensor, tensors: Operands) -> Tensor:
    assert tensors.table is not None
    by_head = ds.sum(0).flatten(1)
    total = torch.zeros_like(tensors.table)
    return total.index_add_(0, _bucket(q, k, tensors).flatten(), by_head.t())


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """bool [heads, rows, blocks] of lists of blocks."""
    most = torch.arange(indices.shape[2], device=counts.device)
    listed = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=counts.device)
    where = indices.long().masked_fill(most >= counts[..., None], blocks)
    return listed.scatter_(2, where, True)[..., :blocks]
