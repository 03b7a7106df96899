"""What a model does where ranks share out the tokens of its rows: attention over ranks, and dropout
by the places of tokens.

    tokens of whole rows, the same on every rank    0 1 2 3 4 5 6 7
    between embedding and head, zigzag on 2 ranks   0 1 6 7 | 2 3 4 5
    loss                                            of a rank's own targets, to be summed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks, ContextRow, Order
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel import Dropout
from pyops.tensor_parallel.functional.scores import (
    EVERYTHING,
    DistanceBias,
    ScoreDropout,
    Seen,
    attend,
)
from pyops.torch_private import disable_dynamo

__all__ = ["ContextCore", "ContextDropout", "TokenContext"]

Runs = tuple[tuple[int, int, int, int], ...]  # (first own row, number of them, place, step)


class TokenContext:
    """How the tokens of rows are shared out.

    Args:
        ranks: That share them.
        order: "zigzag", "contiguous" or "striped".

    Raises:
        ValueError: For another order.
    """

    def __init__(self, ranks: ContextRanks, order: str) -> None:
        if order not in ("zigzag", "contiguous", "striped"):
            raise ValueError(
                f"order is {order!r}; a model takes zigzag, contiguous or striped, which go by the "
                "length of a row alone"
            )
        self.ranks, self.order, self.paused = ranks, order, False
        self.own: int | None = None
        """Tokens of each of the rows at hand that this rank has, where a trainer notes them."""
        self.unpadded: int | None = None
        """Tokens of the rows at hand without what was added so that ranks share them out equally,
        by which dropout counts; None: nothing was added."""
        self.row = lru_cache(maxsize=8)(self._made)
        """Rows of so many tokens: a ContextRow. ValueError where the order can't share them out."""
        self.runs = lru_cache(maxsize=64)(self._runs)
        """See `_runs`."""

    @classmethod
    def of(cls, ranks: ContextRanks | None, order: str) -> TokenContext | None:
        """None without ranks, or for one alone."""
        return None if ranks is None or ranks.size == 1 else cls(ranks, order)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenContext:
        return self  # a copy of a model communicates with the same ranks

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Within it every rank has all tokens, and computes them by itself: to generate texts."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _made(self, length: int) -> ContextRow:
        return ContextRow(self.ranks, Order.of(self.order, length=length, ranks=self.ranks.size))

    def _runs(self, length: int, first: int, number: int, distance: int | None = None) -> Runs:
        """Of a rank's tokens [first, first + number) of all its rows of `length`, one row after the
        other: stretches at equal distances in the numbering of whole rows, which begin `distance`
        apart, or follow one another."""
        places = self.row(length).index().tolist()
        n, apart = len(places), distance or length
        return _stretches([i // n * apart + places[i % n] for i in range(first, first + number)])

    def row_of(self, own: int) -> ContextRow:
        """Rows of which a rank has so many tokens."""
        return self.row(own * self.ranks.size)

    def counted(self, own: int) -> int:
        """By how many tokens of a row dropout counts, where a rank has so many."""
        return self.unpadded or own * self.ranks.size


class ContextCore(nn.Module):
    """Attention between its projections, in the place of `pyops.tensor_parallel`'s Core: of a
    rank's own tokens to those of all ranks.

    Args:
        context: How tokens are shared out.
    """

    def __init__(self, context: TokenContext) -> None:
        super().__init__()
        self.context = context

    def lengths(self, queries: int, keys: int) -> tuple[int, int]:
        """Queries and keys of whole rows, where a rank has so many."""
        if self.context.paused:
            return queries, keys
        return queries * self.context.ranks.size, keys * self.context.ranks.size

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        seen: Seen = EVERYTHING,
        bias: Tensor | DistanceBias | None = None,
        dropout: ScoreDropout | None = None,
    ) -> Tensor:
        """As `attend` of pyops.tensor_parallel, of own tokens; mask [B, T] and documents [B, T] are
        of whole rows.

        Raises:
            ValueError: For a mask or a bias of pairs of tokens, or a sparse pattern.
        """
        if self.context.paused:
            return attend(q, k, v, scale=scale, seen=seen, bias=bias, dropout=dropout)
        pairs = isinstance(bias, Tensor) or (seen.mask is not None and seen.mask.dim() != 2)
        if pairs or seen.layout is not None:
            raise ValueError(
                "a bias or a mask of pairs of tokens, and a sparse pattern, are not shared out "
                "with the tokens of rows; leave them out, or make the model without context"
            )
        drops = None
        if dropout is not None:
            drops = AttentionDropout(
                p=dropout.p, state=dropout.state, row_stride=dropout.row_stride
            )
        row = self.context.row_of(q.shape[1])
        y = row.attention(
            q,
            k,
            v,
            scale=scale,
            mask=AttentionMask(causal=seen.causal, keys=seen.mask, documents=seen.documents),
            bias=None if bias is None else AttentionBias(None, *bias),
            dropout=drops,
        )
        return y.flatten(2)


class ContextDropout(Dropout):
    """Dropout of a rank's own tokens: the elements fall that fall on one rank.

    Args:
        p: Probability with which an element is dropped.
        width: Of x.
        context: How tokens are shared out.
        options: `group` and `sequence_parallel`, as of Dropout.
    """

    def __init__(self, p: float, *, width: int, context: TokenContext, **options: Any) -> None:
        super().__init__(p, width=width, **options)
        self.context, self._length = context, 0

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """See `Dropout.set_dropout_state`; `shape` is (B, T) of whole rows."""
        self._length = shape[1]
        self.state = dropout_state(key, first_row * shape[1] * self.width, device=device)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """dropout(x + bias) + residual, as of Dropout."""
        if not self.training or self.p == 0.0 or self.state is None:
            return super().forward(x, bias, residual)
        y = self._dropped(x if bias is None else x + bias.to(x.dtype))
        return y if residual is None else residual + y

    @disable_dynamo
    def _dropped(self, x: Tensor) -> Tensor:
        assert self.state is not None
        rows = x.reshape(-1, self.width)
        first = self.ranks.rank * len(rows) if self.sequence_parallel else 0
        key, offset = self.state.unbind()
        parts = [
            dropout(
                rows[at : at + number],
                p=self.p,
                state=torch.stack([key, offset + place * self.width]),
                row=self.width,
                row_stride=step * self.width,
            )
            for at, number, place, step in self.context.runs(self._length, first, len(rows))
        ]
        return torch.cat(parts).view(x.shape)


def _stretches(tokens: list[int]) -> Runs:
    """Stretches of tokens at equal distances."""
    found, start, end = [], 0, len(tokens)
    while start < end:
        stop = start + 1
        step = max(tokens[stop] - tokens[start], 1) if stop < end else 1
        while stop < end and tokens[stop] - tokens[stop - 1] == step:
            stop += 1
        found.append((start, stop - start, tokens[start], step))
        start = stop
    return tuple(found)
