"""What a model does where ranks share out the tokens of its rows: attention over ranks, and dropout
by the places of tokens.

    tokens of whole rows, the same on every rank    0 1 2 3 4 5 6 7
    between embedding and head, zigzag on 2 ranks   0 1 6 7 | 2 3 4 5
    loss                                            of a rank's own targets, to be summed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks, ContextRow, Order
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel import Dropout, ParallelMLP
from pyops.tensor_parallel.functional.scores import (
    EVERYTHING,
    DistanceBias,
    ScoreDropout,
    Seen,
    attend,
)
from pyops.torch_private import disable_dynamo

__all__ = ["ContextCore", "ContextDropout", "ContextMLP", "SharedRows", "TokenContext"]

Runs = tuple[tuple[int, int, int, int], ...]  # (first own row, number of them, place, step)


class TokenContext:
    """How the tokens of rows are shared out.

    Args:
        ranks: That share them.
        order: "zigzag", "contiguous" or "striped".
        tokens: Of every row, which is padded to a length that the order shares out; None: rows have
            any length that it does.

    Raises:
        ValueError: For another order.
    """

    def __init__(self, ranks: ContextRanks, order: str, *, tokens: int | None = None) -> None:
        if order not in ("zigzag", "contiguous", "striped"):
            raise ValueError(
                f"order is {order!r}; a model takes zigzag, contiguous or striped, which go by the "
                "length of a row alone"
            )
        self.ranks, self.order, self.tokens, self.paused = ranks, order, tokens, False
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
    def of(
        cls, ranks: ContextRanks | None, order: str, *, tokens: int | None = None
    ) -> TokenContext | None:
        """None without ranks, or for one alone."""
        return None if ranks is None or ranks.size == 1 else cls(ranks, order, tokens=tokens)

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
        size = self.ranks.size
        if self.tokens is not None:
            length = Order.padded_length(self.order, length=length, ranks=size)
        return ContextRow(self.ranks, Order.of(self.order, length=length, ranks=size))

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

    def documents(self, row: ContextRow, rows: int, device: torch.device) -> Tensor | None:
        """int32 [rows, T]: 0 for tokens, -1 for what rows are padded with; None: for nothing."""
        length = row.order.length
        if self.tokens is None or self.tokens == length:
            return None
        return -(torch.arange(length, device=device) >= self.tokens).int().expand(rows, length)

    def added(self, own: int, rows: int, device: torch.device) -> Tensor | None:
        """As `documents`, -1 for what was added to rows, of which a rank has so many tokens, so
        that ranks share them out equally."""
        if self.unpadded is None:
            return None
        places = torch.arange(own * self.ranks.size, device=device)
        return -(places >= self.unpadded).int().expand(rows, -1)

    def counted(self, own: int) -> int:
        """By how many tokens of a row dropout counts, where a rank has so many."""
        return self.unpadded or own * self.ranks.size


class ContextCore(nn.Module):
    """Attention between its projections, in the place of `pyops.tensor_parallel`'s Core: of a
    rank's own tokens to those of all ranks.

    Args:
        context: How tokens are shared out.
        cross: Whether keys are of another row than queries, which is shared out in the same order.
    """

    def __init__(self, context: TokenContext, *, cross: bool = False) -> None:
        super().__init__()
        self.context, self.cross = context, cross

    def lengths(self, queries: int, keys: int) -> tuple[int, int]:
        """Queries and keys of whole rows, where a rank has so many."""
        context = self.context
        if context.paused:
            return queries, keys
        if context.tokens is not None:
            return context.tokens, context.tokens
        return queries * context.ranks.size, keys * context.ranks.size

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
        of whole rows, as is the layout of a pattern.

        Raises:
            ValueError: For a mask or a bias of pairs of tokens.
        """
        context = self.context
        if context.paused:
            return attend(q, k, v, scale=scale, seen=seen, bias=bias, dropout=dropout)
        if isinstance(bias, Tensor) or (seen.mask is not None and seen.mask.dim() != 2):
            raise ValueError(
                "a bias or a mask of pairs of tokens is not shared out with the tokens of rows; "
                "leave it out, or make the model without context"
            )
        row = context.row_of(q.shape[1])
        if self.cross:
            row = replace(row, memory=context.row_of(k.shape[1]).order)
        documents = seen.documents
        if documents is None:
            documents = context.documents(row, len(q), q.device)
        drops = None
        if dropout is not None:
            drops = AttentionDropout(
                p=dropout.p,
                state=dropout.state,
                row_stride=dropout.row_stride,
                num_queries=context.tokens,
                num_keys=context.tokens,
            )
        y = row.attention(
            q,
            k,
            v,
            scale=scale,
            mask=AttentionMask(
                causal=seen.causal, keys=seen.mask, documents=documents, layout=seen.layout
            ),
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
        runs = self.context.runs(self._length, first, len(rows))
        return _drop(rows, runs, p=self.p, state=self.state, width=self.width).view(x.shape)


class ContextMLP(ParallelMLP):
    """An MLP of a rank's own tokens, inside of which the elements fall that fall on one rank.

    Args:
        context: How tokens are shared out.
        sizes: `dim` and `hidden`, as of ParallelMLP.
        options: As of ParallelMLP.
    """

    def __init__(self, *sizes: Any, context: TokenContext, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.context, self._length = context, 0

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """See `ParallelMLP.set_dropout_state`; `shape` is (B, T) of whole rows."""
        self._length = shape[1]
        super().set_dropout_state(key=key, first_row=first_row, shape=shape, device=device)

    def drop(self, h: Tensor, state: Tensor) -> Tensor:
        """As of ParallelMLP, of own tokens."""
        if self.context.paused:
            return super().drop(h, state)
        rows = h.reshape(-1, h.shape[-1])
        runs = self.context.runs(self._length, 0, len(rows))
        return _drop(rows, runs, p=self.dropout, state=state, width=self.hidden).view(h.shape)


class SharedRows(nn.Module):
    """A model whose rows of tokens ranks may share out.

    Attributes:
        shared_rows: How they do; None: every rank has all tokens.
    """

    shared_rows: TokenContext | None = None

    @property
    def num_context_ranks(self) -> int:
        """How many ranks share out the tokens of rows."""
        return 1 if self.shared_rows is None else self.shared_rows.ranks.size

    def whole_rows(self) -> AbstractContextManager[None]:
        """Within it every rank has all tokens of its rows, and computes them by itself: to generate
        texts, say. In eval mode."""
        return nullcontext() if self.shared_rows is None else self.shared_rows.whole_rows()


def _drop(rows: Tensor, runs: Runs, *, p: float, state: Tensor, width: int) -> Tensor:
    """Dropout of rows, of tokens in these stretches, of which each has `width` counters."""
    key, offset = state.unbind()
    return torch.cat(
        [
            dropout(
                rows[at : at + number],
                p=p,
                state=torch.stack([key, offset + place * width]),
                row=rows.shape[-1],
                row_stride=step * width,
            )
            for at, number, place, step in runs
        ]
    )


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
