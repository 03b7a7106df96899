"""RowCache: keys and values of rows of different lengths, in memory that is allocated once.

    row 0   k k k k k k . .     a forward adds tokens to some rows, which lie one after the other:
    row 1   k k k . . . . .     several tokens to one row (a prompt, or a part of it),
    row 2   k k k k k . . .     or as many to each of several rows (the next token)
            places 0, 1, ...    masks and positions are made of each row's own length

A row's memory is handed to another text by setting its length to 0: of what stands behind a row's
length nothing is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.attention.distance import relative_buckets
from pyops.tensor_parallel.functional.scores import DistanceBias, Seen

__all__ = ["MemoryRows", "RowCache", "RowSpan"]


class RowSpan:
    """The tokens that one forward adds to the rows [begin, begin + len(lengths)) of the caches of
    all layers.

    Args:
        begin: The first row.
        lengths: How many tokens each row has already.
        num_tokens: How many are added to each; 1 where the lengths differ.
        reserve: How many tokens a row will have at most, where that is known: so many are allocated
            at once.
        device: Of the tokens.

    Raises:
        ValueError: For several tokens to rows of different lengths.
    """

    def __init__(
        self,
        begin: int,
        lengths: Sequence[int],
        num_tokens: int,
        *,
        reserve: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.begin, self.end = begin, begin + len(lengths)
        self.first, self.num_tokens = max(lengths), num_tokens
        self.keys = self.first + num_tokens
        self.reserve = max(reserve, self.keys)
        self.ragged = len(set(lengths)) > 1
        if self.ragged and num_tokens > 1:
            raise ValueError(
                f"{num_tokens} tokens are added to rows of lengths {list(lengths)}; add one at a "
                "time, or to one row alone"
            )
        self.places_RT = torch.tensor(lengths, device=device)[:, None]
        if num_tokens > 1:
            self.places_RT = self.places_RT + torch.arange(num_tokens, device=device)
        """int64 [R, T]: the place of each new token in its row."""
        self.row_R = torch.arange(self.begin, self.end, device=device) if self.ragged else None
        self.turns: tuple[Tensor, Tensor] | None = None
        """Rotary tables of these places, where a layer has made them: they serve all layers."""
        self.mask_RS: Tensor | None = None
        """bool [R, keys]: which keys each row has; None: all have all."""
        if self.ragged:
            self.mask_RS = torch.arange(self.keys, device=device) <= self.places_RT

    def seen(self, seen: Seen, *, by_distance: bool) -> Seen:
        """What the new tokens see of the keys of their rows.

        Args:
            seen: Of the layer: `causal`.
            by_distance: A bias goes by the distance of query and key.
        """
        several = seen.causal and self.num_tokens > 1
        places = None
        if self.first and (several or by_distance):
            device = self.places_RT.device
            places = (self.places_RT[0], torch.arange(self.keys, device=device))
        return seen._replace(causal=several, mask=self.mask_RS, places=places)

    def bias(self, bias: DistanceBias) -> Tensor | DistanceBias:
        """A bias by distance as attention takes it: where lengths differ, [R, H, 1, keys]."""
        if not self.ragged or bias.table is None:
            return bias
        most = bias.max_distance
        buckets = relative_buckets(
            bias.table.shape[0],
            max_distance=most,
            bidirectional=bias.bidirectional,
            device=bias.table.device,
        )
        distance_RS = torch.arange(self.keys, device=bias.table.device) - self.places_RT
        place_RS = buckets[distance_RS.clamp(-most, most) + most]
        return functional.embedding(place_RS, bias.table).permute(0, 2, 1).unsqueeze(2)


class RowCache:
    """Of one attention, on this rank's heads; of no use to gradients. Before each forward `span` is
    set to what it adds.

    Args:
        num_rows: How many rows there are.
        dtype: That keys and values are kept in; None: that which they are computed in.
    """

    def __init__(self, num_rows: int, *, dtype: torch.dtype | None = None) -> None:
        self.num_rows, self.dtype = num_rows, dtype
        self.span: RowSpan | None = None
        self._kept: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Tokens so far, of the longest of the rows that are added to."""
        return 0 if self.span is None else self.span.first

    @property
    def num_bytes(self) -> int:
        """Of memory that is taken."""
        return 0 if self._kept is None else sum(x.numel() * x.element_size() for x in self._kept)

    def move(self, source: int, target: int) -> None:
        """Give a row's keys and values to another row."""
        for kept in self._kept or ():
            kept[target].copy_(kept[source])

    def attended(
        self, k: Tensor, v: Tensor, seen: Seen, *, by_distance: bool
    ) -> tuple[Tensor, Tensor, Seen]:
        """Add k, v [R, T, G, K] to their rows -> (k, v) [R, keys, G, K] of all, and which of them
        are seen.

        Args:
            k, v: Of the new tokens.
            seen: Of the layer.
            by_distance: A bias goes by the distance of query and key.
        """
        k, v = self.append(k, v)
        assert self.span is not None
        return k, v, self.span.seen(seen, by_distance=by_distance)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [R, T, G, K] to their rows -> [R, keys, G, K] of all.

        Args:
            k, v: Of the new tokens.
        """
        span = self.span
        assert span is not None
        found = []
        for kept, new in zip(self._room(k, span), (k, v), strict=True):
            if span.row_R is None:
                rows = kept[span.begin : span.end, :, span.first : span.keys]
                rows.copy_(new.transpose(1, 2))
            else:
                kept[span.row_R, :, span.places_RT[:, 0]] = new[:, 0].to(kept.dtype)
            found.append(kept[span.begin : span.end, :, : span.keys].transpose(1, 2))
        return found[0], found[1]

    def room(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The memory of all rows' keys and values, [num_rows, G, S, K] each, with room for what the
        span adds.

        Args:
            k: [R, T, G, K], of the new tokens.
        """
        assert self.span is not None
        return self._room(k, self.span)

    def _room(self, k: Tensor, span: RowSpan) -> tuple[Tensor, Tensor]:
        """Memory [num_rows, G, S, K], S >= span.keys, with what was kept."""
        before = self._kept
        if before is not None and before[0].shape[2] >= span.keys:
            return before
        length = span.reserve if before is None else max(span.reserve, 2 * before[0].shape[2])
        shape = (self.num_rows, k.shape[2], length, k.shape[3])
        # Zeros: what no token has written yet is multiplied by 0, which NaN would survive.
        made = [k.new_zeros(shape, dtype=self.dtype or k.dtype) for _ in range(2)]
        if before is not None:
            for new, old in zip(made, before, strict=True):
                new[:, :, : old.shape[2]] = old
        self._kept = (made[0], made[1])
        return self._kept


class MemoryRows(RowCache):
    """Keys and values of the memories that rows of a decoder look at, for cross-attention: each is
    computed once."""

    def __init__(self, num_rows: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_rows, dtype=dtype)
        self._lengths = [0] * num_rows

    def fill(self, row: int, k: Tensor, v: Tensor) -> None:
        """The keys and values of a row's memory.

        Args:
            row: Which.
            k, v: [1, S, G, K].
        """
        self._lengths[row] = k.shape[1]
        span = RowSpan(row, [0], k.shape[1], device=k.device)
        for kept, new in zip(self._room(k, span), (k, v), strict=True):
            kept[row : row + 1, :, : k.shape[1]].copy_(new.transpose(1, 2))

    def move(self, source: int, target: int) -> None:
        """Give a row's memory to another row."""
        super().move(source, target)
        self._lengths[target] = self._lengths[source]

    def remembered(self, seen: Seen) -> tuple[Tensor, Tensor, Seen]:
        """(k, v) [R, S, G, K] of the memories of the span's rows, and which keys are seen."""
        span = self.span
        assert span is not None
        assert self._kept is not None
        lengths = self._lengths[span.begin : span.end]
        most = max(lengths)
        k, v = (kept[span.begin : span.end, :, :most].transpose(1, 2) for kept in self._kept)
        mask = None
        if min(lengths) < most:
            places = torch.arange(most, device=k.device)
            mask = places < torch.tensor(lengths, device=k.device)[:, None]
        return k, v, seen._replace(mask=mask)
