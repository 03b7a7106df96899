"""What attention refuses, before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyops.ops.attention.arguments import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.attention.block_layout import BlockLayout
from pyops.ops.attention.operands import wide_dtype

__all__ = ["check_attention"]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    bias: AttentionBias,
    dropout: AttentionDropout | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> None:
    """ValueError or TypeError for arguments that don't fit each other.

    What the numbers in tensors say is looked at on the CPU only: nothing waits for a GPU, and
    nothing is read while torch.compile traces.
    """
    _check_heads(q, k, v)
    if not (math.isfinite(scale) and scale):
        raise ValueError(f"attention: scale is {scale}; give a finite factor other than 0")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"attention: soft_cap is {soft_cap}; give a number above 0, or None")
    _check_mask(q, k, mask)
    _check_places(q, k, mask.places)
    _check_layout(q, k, mask)
    _check_bias(q, k, bias)
    if dropout is not None:
        _check_dropout(q, k, mask, dropout)


def _readable(*tensors: Tensor) -> bool:
    """Whether their numbers can be looked at without waiting for a device."""
    return not torch.compiler.is_compiling() and all(
        t.device.type == "cpu" and t.numel() > 0 and type(t) in (Tensor, torch.nn.Parameter)
        for t in tensors
    )


def _described(x: object) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)


def _require_tensor(
    x: Any, name: str, shape: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(x, Tensor) or x.dtype != dtype:
        raise TypeError(f"attention: {name} must be {dtype} {shape}; got {_described(x)}")
    if list(x.shape) != shape or x.device != device:
        raise ValueError(f"attention: {name} must be {shape} on {device}; got {_described(x)}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            "attention: q, k and v must be of one dtype, float32, float64, bfloat16 or float16; "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    fits = (
        q.dim() == 4
        and k.dim() == 4
        and v.shape == k.shape
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and len({q.device, k.device, v.device}) == 1
    )
    if not fits:
        raise ValueError(
            "attention: q must be [B, T, H, K], k and v [B, S, G, K], on one device; got "
            f"{_described(q)}, {_described(k)}, {_described(v)}"
        )
    H, G, K = q.shape[2], k.shape[2], q.shape[3]
    if H < 1 or G < 1 or K < 1 or H % G:
        raise ValueError(
            f"attention: the number of q's heads must be a multiple of that of k's, both and the "
            f"width of a head above 0; got {H} and {G} heads of width {K}"
        )


def _check_mask(q: Tensor, k: Tensor, mask: AttentionMask) -> None:
    if not isinstance(mask, AttentionMask):
        raise TypeError(
            f"attention: mask must be an AttentionMask, as AttentionMask(keys=...); got {mask!r}"
        )
    B, T, S = q.shape[0], q.shape[1], k.shape[1]
    if mask.window is not None and (
        len(mask.window) != 2 or any(n is not None and n < 0 for n in mask.window)
    ):
        raise ValueError(
            f"attention: window is {mask.window}; give (before, after), each a number of places, "
            "0 or more, or None for all"
        )
    if mask.keys is not None:
        _require_tensor(mask.keys, "mask.keys", [B, S], torch.bool, q.device)
    documents = mask.documents
    if documents is None:
        return
    if isinstance(documents, Tensor) and T != S:
        raise ValueError(
            f"attention: {T} queries and {S} keys need documents of both, (queries' [B, T], "
            "keys' [B, S])"
        )
    pair = (documents, documents) if isinstance(documents, Tensor) else documents
    for name, ids, n in (("queries'", pair[0], T), ("keys'", pair[1], S)):
        _require_tensor(ids, f"{name} documents", [B, n], torch.int32, q.device)
        if _readable(ids) and int(ids.min()) < -1:
            raise ValueError(
                f"attention: {name} documents hold {int(ids.min())}; ids are 0 or more, and -1 for "
                "padding"
            )


def _check_places(q: Tensor, k: Tensor, places: tuple[Tensor, Tensor] | None) -> None:
    if places is None:
        return
    for name, x, n in (("queries", places[0], q.shape[1]), ("keys", places[1], k.shape[1])):
        _require_tensor(x, f"places of {name}", [n], torch.int64, q.device)
        if not _readable(x):
            continue
        if int(x.min()) < 0:
            raise ValueError(
                f"attention: places of {name} hold {int(x.min())}; they count from 0 in the row"
            )
        ascending = x.sort().values
        if (twice := (ascending[1:] == ascending[:-1]).nonzero()).numel():
            raise ValueError(
                f"attention: place {int(ascending[int(twice[0])])} stands twice in the places of "
                f"{name}; each token has one of its own"
            )


def _check_layout(q: Tensor, k: Tensor, mask: AttentionMask) -> None:
    layout = mask.layout
    if layout is None:
        return
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"attention: mask.layout must be a BlockLayout; got {layout!r}")
    H, T, S = q.shape[2], q.shape[1], k.shape[1]
    if (layout.num_queries, layout.num_keys) != (T, S):
        raise ValueError(
            f"attention: the layout is for {layout.num_queries} queries and {layout.num_keys} "
            f"keys, and there are {T} and {S}; make one for these"
        )
    if layout.num_heads not in (1, H):
        raise ValueError(
            f"attention: the layout has {layout.num_heads} heads and q has {H}; give it 1, or one "
            "for each"
        )
    if layout.device != q.device:
        raise ValueError(
            f"attention: the layout is on {layout.device} and q on {q.device}; move it with "
            "layout.to(device)"
        )
    if layout.causal and mask.places is not None:
        raise ValueError(
            "attention: a causal layout counts places from 0, and other places are given; make it "
            "with causal=False, and use AttentionMask(causal=True)"
        )
    if _readable(layout.indices):
        _check_lists(layout)


def _check_lists(layout: BlockLayout) -> None:
    """ValueError for a list of blocks that is not ascending within those there are."""
    counts, indices = layout.counts, layout.indices
    slots = torch.arange(indices.shape[2])
    listed = slots < counts[..., None]
    outside = listed & ((indices < 0) | (indices >= layout.num_key_blocks))
    falling = listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])
    if bool(outside.any()) or bool(falling.any()) or int(counts.max()) > indices.shape[2]:
        raise ValueError(
            f"attention: a list of blocks of the layout does not ascend within "
            f"{layout.num_key_blocks} blocks of keys, or is longer than its table; make the layout "
            "by from_dense or from_pairs"
        )


def _check_bias(q: Tensor, k: Tensor, bias: AttentionBias) -> None:
    B, T, H, S, wide = q.shape[0], q.shape[1], q.shape[2], k.shape[1], wide_dtype(q.dtype)
    scores, table, slopes = bias.scores, bias.table, bias.slopes
    if scores is not None:
        if not isinstance(scores, Tensor) or scores.dtype not in (q.dtype, torch.float32):
            raise TypeError(
                f"attention: a bias must be {q.dtype}, as q, or float32; got {_described(scores)}. "
                "For keys that are not to be seen use mask=AttentionMask(keys=...)"
            )
        whole = (B, H, T, S)
        fits = scores.dim() <= 4 and all(
            n in (1, w) for n, w in zip(scores.shape[::-1], whole[::-1], strict=False)
        )
        if not fits or scores.device != q.device:
            raise ValueError(
                f"attention: a bias must be broadcastable to [B, H, T, S] = {list(whole)}, on "
                f"{q.device}; got {_described(scores)}"
            )
    if table is not None:
        _check_table(table, bias, H, q.device)
    if slopes is not None:
        if not isinstance(slopes, Tensor) or slopes.dtype not in FLOATS:
            raise TypeError(f"attention: slopes must be [{H}] floats; got {_described(slopes)}")
        _require_tensor(slopes, "slopes", [H], slopes.dtype, q.device)
        if slopes.requires_grad:
            raise ValueError(
                "attention: slopes have no gradient; pass slopes.detach(), or a bias that is made "
                "of them"
            )
        if slopes.dtype == torch.float64 and wide != torch.float64:
            raise TypeError("attention: slopes are float64 and q is not; pass slopes.float()")


def _check_table(table: Tensor, bias: AttentionBias, H: int, device: torch.device) -> None:
    least = 4 if bias.bidirectional else 2
    fits = table.dim() == 2 and table.shape[1] == H and table.shape[0] >= least
    if table.dtype not in FLOATS or not fits or table.device != device:
        raise ValueError(
            f"attention: a table of relative biases must be [num_buckets, {H}] floats on {device}, "
            f"of {least} buckets or more; got {_described(table)}"
        )
    exact = table.shape[0] // (2 if bias.bidirectional else 1) // 2
    if bias.max_distance <= exact:
        raise ValueError(
            f"attention: max_distance is {bias.max_distance} and {exact} distances have buckets of "
            "their own; give a larger distance, or a smaller table"
        )


def _check_dropout(q: Tensor, k: Tensor, mask: AttentionMask, dropout: AttentionDropout) -> None:
    if not isinstance(dropout, AttentionDropout):
        raise TypeError(f"attention: dropout must be an AttentionDropout; got {dropout!r}")
    if not 0.0 <= dropout.p < 1.0:
        raise ValueError(
            f"attention: p is {dropout.p}; a probability of 0 up to but not including 1"
        )
    if dropout.p == 0:
        return
    if dropout.state is None:
        raise ValueError(
            f"attention: dropout of p = {dropout.p} needs a state, int64 [2] of key and counter, "
            "as pyops.ops.layers.dropout.dropout_state makes it"
        )
    _require_tensor(dropout.state, "state", [2], torch.int64, q.device)
    if _readable(dropout.state) and int(dropout.state[1]) < 0:
        raise ValueError(
            f"attention: state's second number is a counter, 0 or more; got {int(dropout.state[1])}"
        )
    _check_counters(q, k, mask, dropout)


def _check_counters(q: Tensor, k: Tensor, mask: AttentionMask, dropout: AttentionDropout) -> None:
    T, S, H = q.shape[1], k.shape[1], q.shape[2]
    heads = H if dropout.num_heads is None else dropout.num_heads
    if dropout.first_row < 0 or not 0 <= dropout.first_head <= heads - H:
        raise ValueError(
            f"attention: heads {dropout.first_head} to {dropout.first_head + H} of {heads} and "
            f"rows from {dropout.first_row} on; first_head + {H} must be within num_heads, and "
            "first_row 0 or more"
        )
    if dropout.row_stride is not None and dropout.row_stride < 0:
        raise ValueError(f"attention: row_stride is {dropout.row_stride}; 0 or more")
    documents = mask.documents
    both = (documents, documents) if isinstance(documents, Tensor) else documents or (None, None)
    whole = (
        ("num_queries", dropout.num_queries, T, mask.places and mask.places[0], both[0]),
        ("num_keys", dropout.num_keys, S, mask.places and mask.places[1], both[1]),
    )
    for name, given, own, places, ids in whole:
        if places is not None and given is None:
            raise ValueError(
                f"attention: dropout by places needs {name}, those of the whole row: "
                f"AttentionDropout(..., {name}=...)"
            )
        if given is None or (given >= own and places is None):
            continue
        needed = _counted(places, ids, own)
        if needed is not None and given < needed:
            raise ValueError(
                f"attention: {name} is {given}, and the counters of {needed} are needed"
            )


def _counted(places: Tensor | None, documents: Tensor | None, own: int) -> int | None:
    """One more than the last place that has counters: padding, which sees and is seen by nothing,
    needs none. None where numbers can't be looked at."""
    if documents is None and places is None:
        return own
    if not all(x is None or _readable(x) for x in (places, documents)):
        return None
    where = torch.arange(own, device="cpu") if places is None else places
    if documents is not None:
        where = where[(documents >= 0).any(0)]
    return int(where.max()) + 1 if where.numel() else 0
