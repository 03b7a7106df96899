"""The arguments of the attention ops as the Triton kernels take them, and the lists of tiles that
meet where that does not follow from the tiles' numbers.

    nothing hidden, causal, window     the range of a program's visits follows from its tile
    block layout                       its own lists of blocks; tiles divide blocks
    documents, mask, places            lists of tiles, made on the device from what each tile holds:
                                       the first and last place, the smallest and largest document
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.attention.operands import Operands, Options, wide_dtype
from pyops.ops.triton.launch import dense

__all__ = ["Problem", "unit_stride"]

# Queries and keys of a tile by bytes of a number, forward and backward, for heads of up to 64; for
# wider ones half, or a quarter.
TILES = {2: ((128, 64), (64, 64)), 4: ((64, 32), (32, 32)), 8: ((32, 16), (16, 16))}


def bits(x: float) -> int:
    """A float64 as a whole number: a kernel's argument that is a float has 32 bits only."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


class Problem:
    """Checked tensors and numbers of one call."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        operands: Sequence[Tensor | None],
        options: Mapping[str, Any],
    ) -> None:
        self.q, self.k, self.v = (unit_stride(x) for x in (q, k, v))
        self.tensors, self.numbers = Operands(*operands), Options(**options)
        check(q, k, v, self.tensors, self.numbers)
        self.wide = wide_dtype(q.dtype)
        self.hidden = any(
            x is not None
            for x in (
                self.tensors.mask,
                self.tensors.query_documents,
                self.tensors.query_places,
                self.tensors.key_places,
            )
        )
        self.listed = self.tensors.row_counts is not None

    def constants(self, *, backward: bool) -> dict[str, Any]:
        """Constants of the kernels and sizes of their tiles."""
        numbers, width = self.numbers, max(16, triton.next_power_of_2(self.q.shape[3]))
        M, N = TILES[self.q.element_size()][backward]
        shrink = max(1, width // 64)
        M, N = max(16, M // shrink), max(16, N // min(shrink, 2))
        if self.listed:
            divides = numbers.block & -numbers.block
            M, N = min(M, divides), min(N, divides)
        return {
            "C": tl.float64 if self.wide == torch.float64 else tl.float32,
            "M": M,
            "N": N,
            "WIDTH": width,
            "OPAQUE": self.hidden,
            "LISTED": numbers.block if self.listed else 0,
            "CAPPED": numbers.soft_cap > 0,
            "PRECISION": "ieee",
            "num_warps": 8 if backward or M * N > 4096 else 4,
        }

    def arguments(self, *, rows: bool, M: int, N: int) -> list[Any]:
        """q, k, v, the other tensors and all numbers; lists by rows of queries or by columns of
        keys."""
        tensors, numbers, q, k, v = self.tensors, self.numbers, self.q, self.k, self.v
        bias = tensors.bias
        strides = (0, 0, 0, 0) if bias is None else _strides(bias)
        after = 0 if numbers.causal else numbers.after
        by_four = numbers.num_keys % 4 == 0 and numbers.row_stride % 4 == 0 and not self._exact
        return [
            q, k, v, bias, self._distances(), dense(tensors.slopes), self._mask(),
            dense(tensors.query_documents), dense(tensors.key_documents),
            dense(tensors.query_places), dense(tensors.key_places),
            *(lists := self._lists(rows=rows, M=M, N=N))[:2],
            dense(tensors.state) if numbers.p > 0 else None,
            *(s for x in (q, k, v) for s in x.stride()[:3]), *strides,
            q.shape[1], k.shape[1], q.shape[2], q.shape[3], q.shape[2] // k.shape[2],
            0 if tensors.buckets is None else tensors.buckets.numel() // 2,
            *(n if n >= 0 else None for n in (numbers.before, after)), *lists[2:],
            numbers.first, numbers.row_stride, numbers.num_queries, numbers.num_keys,
            1 if by_four and tensors.key_places is None else None,
            math.ceil(float(np.float32(numbers.p)) * 2**24),
            *map(bits, (numbers.scale, numbers.soft_cap, 1.0 / (1.0 - numbers.p))),
        ]  # fmt: skip

    @property
    def _exact(self) -> bool:
        """Whether products are of float64: Triton 3.6 gives their operands the layout of what they
        were computed from, and compiles none of bytes, or of four random numbers together."""
        return self.wide == torch.float64

    def _mask(self) -> Tensor | None:
        mask = dense(self.tensors.mask)
        return mask.int() if mask is not None and self._exact else mask

    def _distances(self) -> Tensor | None:
        """wide [H, 2 reach + 1]: the bias of each distance."""
        table, buckets = self.tensors.table, self.tensors.buckets
        if table is None or buckets is None:
            return None
        return table.t()[:, buckets.long()].contiguous()

    def _lists(self, *, rows: bool, M: int, N: int) -> tuple[Any, ...]:
        """Counts, indices, how far the lists of a row of the batch and those of a head lie behind
        those before, and the most of one list."""
        tensors = self.tensors
        if self.listed:
            counts = dense(tensors.row_counts if rows else tensors.column_counts)
            indices = dense(tensors.row_indices if rows else tensors.column_indices)
            assert counts is not None
            assert indices is not None
            per_head = counts.shape[1]
            return counts, indices, 0, per_head * (counts.shape[0] > 1), indices.shape[2]
        if not self.hidden:
            return None, None, 0, 0, 0
        meet = self._meeting(M, N)
        if not rows:
            meet = meet.mT
        counts = meet.sum(-1, dtype=torch.int32)
        slot = meet.cumsum(-1, dtype=torch.int32) - 1
        per_row, most = meet.shape[1], meet.shape[2]
        indices = torch.zeros(*counts.shape, most + 1, dtype=torch.int32, device=meet.device)
        number = torch.arange(most, dtype=torch.int32, device=meet.device).expand(meet.shape)
        indices.scatter_(-1, torch.where(meet, slot, most).long(), number.contiguous())
        return counts, indices, per_row * (counts.shape[0] > 1), 0, most + 1

    def _meeting(self, M: int, N: int) -> Tensor:
        """bool [1 or B, tiles of queries, tiles of keys]: where a pair may see each other."""
        tensors, numbers = self.tensors, self.numbers
        T, S, device = self.q.shape[1], self.k.shape[1], self.q.device
        first_t, last_t = _ends(tensors.query_places, T, M, device)
        first_s, last_s = _ends(tensors.key_places, S, N, device)
        after = 0 if numbers.causal else numbers.after
        meet = torch.ones(1, len(first_t), len(first_s), dtype=torch.bool, device=device)
        if after >= 0:
            meet = meet & (first_s <= last_t[:, None] + after)
        if numbers.before >= 0:
            meet = meet & (last_s >= first_t[:, None] - numbers.before)
        if tensors.mask is not None:
            meet = meet & _tiled(tensors.mask.int(), N, 0).amax(-1).bool()[:, None]
        if tensors.query_documents is not None and tensors.key_documents is not None:
            own, other = tensors.query_documents, tensors.key_documents
            most = torch.iinfo(torch.int32).max
            low_t, low_s = (
                _tiled(torch.where(x < 0, most, x), n, most).amin(-1)
                for x, n in ((own, M), (other, N))
            )
            high_t, high_s = (_tiled(x, n, -1).amax(-1) for x, n in ((own, M), (other, N)))
            low = torch.maximum(low_t[:, :, None], low_s[:, None])
            meet = meet & (low <= torch.minimum(high_t[:, :, None], high_s[:, None]))
        return meet


def _strides(bias: Tensor) -> tuple[int, ...]:
    return tuple(
        0 if n == 1 and d < 3 else step
        for d, (n, step) in enumerate(zip(bias.shape, bias.stride(), strict=True))
    )


def unit_stride(x: Tensor) -> Tensor:
    """x, or a copy of it, whose last dimension has no gaps."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _tiled(x: Tensor, size: int, fill: int) -> Tensor:
    """[.., n] as [.., tiles, size]."""
    padding = -x.shape[-1] % size
    return torch.nn.functional.pad(x, (0, padding), value=fill).unflatten(-1, (-1, size))


def _ends(places: Tensor | None, n: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last place of each tile."""
    if places is None:
        first = torch.arange(0, n, size, device=device)
        return first, (first + size - 1).clamp(max=n - 1)
    low = _tiled(places, size, torch.iinfo(torch.int64).max).amin(-1)
    return low, _tiled(places, size, -1).amax(-1)


def check(q: Tensor, k: Tensor, v: Tensor, tensors: Operands, numbers: Options) -> None:
    """ValueError unless tensors fit each other: the kernels read what the shapes say."""
    B, T, H, K = q.shape
    S, G = k.shape[1], k.shape[2]
    fits = (
        k.shape == v.shape == (B, S, G, K)
        and len({q.dtype, k.dtype, v.dtype}) == 1
        and G > 0
        and H % G == 0
    )
    if not fits or K > 256:
        raise ValueError(
            "attention: q must be [B, T, H, K], k and v [B, S, G, K] of one dtype, K up to 256 and "
            f"H a multiple of G; got {list(q.shape)} {q.dtype}, {list(k.shape)} {k.dtype}, "
            f"{list(v.shape)} {v.dtype}"
        )
    shapes: dict[str, tuple[Sequence[int], torch.dtype]] = {
        "slopes": ((H,), wide_dtype(q.dtype)),
        "mask": ((B, S), torch.bool),
        "query_documents": ((B, T), torch.int32),
        "key_documents": ((B, S), torch.int32),
        "query_places": ((T,), torch.int64),
        "key_places": ((S,), torch.int64),
        "state": ((2,), torch.int64),
    }
    for name, (shape, dtype) in shapes.items():
        x = getattr(tensors, name)
        if x is not None and (tuple(x.shape) != tuple(shape) or x.dtype != dtype):
            raise ValueError(
                f"attention: {name} must be {list(shape)} {dtype}; got {list(x.shape)} {x.dtype}"
            )
    if (tensors.query_documents is None) != (tensors.key_documents is None):
        raise ValueError("attention: documents are of queries and keys, or of neither")
    bias, table = tensors.bias, tensors.table
    if bias is not None and (
        bias.dim() != 4
        or any(n not in (1, w) for n, w in zip(bias.shape, (B, H, T), strict=False))
        or bias.shape[3] != S
    ):
        raise ValueError(
            f"attention: bias must be [1 or B, 1 or H, 1 or T, S]; got {list(bias.shape)}"
        )
    if table is not None and (tensors.buckets is None or table.shape[1:] != (H,)):
        raise ValueError(f"attention: table must be [buckets, {H}]; got {list(table.shape)}")
    _check_layout(q, k, tensors, numbers)


def _check_layout(q: Tensor, k: Tensor, tensors: Operands, numbers: Options) -> None:
    if tensors.row_counts is None:
        return
    block, H = numbers.block, q.shape[2]
    if block < 16 or block % 16:
        raise ValueError(f"attention: the block of a layout is {block}; a multiple of 16")
    for counts, indices, n in (
        (tensors.row_counts, tensors.row_indices, q.shape[1]),
        (tensors.column_counts, tensors.column_indices, k.shape[1]),
    ):
        fits = (
            counts is not None
            and indices is not None
            and counts.shape[0] in (1, H)
            and counts.shape[1:] == (-(-n // block),)
            and indices.shape[:2] == counts.shape
            and {counts.dtype, indices.dtype} == {torch.int32}
        )
        if not fits:
            raise ValueError(
                f"attention: a layout has counts [1 or {H}, {-(-n // block)}] and indices "
                "[.., most], int32, by rows and by columns"
            )
