"""KeyedStream: which elements of a tensor fall is a function of a key and of their places in the
global batch, whatever part of it a rank has.

    rows                0 1 | 2 3 | 4 5 | 6 7      a micro-batch has those from first_row on
    heads, or columns   h0 h1 | h2 h3              a rank of tensor parallelism has some of each row

    tokens of all rows  0 ... n-1 | n ... 2n-1     under sequence parallelism, a rank has n of them

    tokens of a row     0 1 6 7 | 2 3 4 5          under context parallelism, a rank has some

    counter of an element = its index in the tensor [all rows, all heads, ...]

The masks are those of `pyops.random.dropout_mask` under the same key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.models.context import TokenContext
from pyops.ops.attention import AttentionDropout
from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel.convert.region_hooks import Tokens
from pyops.torch_private import disable_dynamo

__all__ = ["ColumnsOpen", "KeyedStream"]


class ColumnsOpen:
    """Whether the activations at hand are a rank's heads or columns: so it is between a layer that
    is cut by columns and the next one that is cut by rows.

    Attributes:
        value: True within.
    """

    def __init__(self) -> None:
        self.value = False


class StreamState(NamedTuple):
    """What a stream draws next goes by."""

    place: Tensor
    """int64 [2]: the key, and the number of the first row in the batch of all ranks."""
    num_rows: int | None
    """How many rows the forward has; None: as many as the first dimension of each tensor."""


class RankPart(NamedTuple):
    """A rank's part of each row of a tensor."""

    dim: int
    """Along which the rows are cut."""
    start: int
    """Where the part begins."""
    whole: int
    """The length of the whole."""


class KeyedStream(nn.Module):
    """The random numbers of one module's dropout. It has neither parameters nor buffers, so that a
    module of anybody's can have it as a child and keeps its state_dict.

    Args:
        rows: Of the weight of the layer, cut by rows, that the module's heads or columns go to.
            None: every rank has all of them.
        columns_open: Of the model; needed with `rows`.
        tokens: Of the blocks that the module is in, under sequence parallelism, whose tensors of
            two dims are rows of them: [a rank's rows, D], or [all rows and padding, columns].
        context: How ranks share out the tokens of rows; None: every rank has all.

    Attributes:
        state: None before it is set. Each call puts another in its place, with the next key: a
            module that is called twice draws two masks, and a second forward with the old state
            draws both again.
    """

    state: StreamState | None

    def __init__(
        self,
        rows: Placement | None = None,
        columns_open: ColumnsOpen | None = None,
        tokens: Tokens | None = None,
        context: TokenContext | None = None,
    ) -> None:
        super().__init__()
        self.rows, self.columns_open, self.tokens = rows, columns_open, tokens
        self.context = context
        # No buffer: those are broadcast by some wrappers, and other ranks have other rows.
        self.state = None

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, ...] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Set the dropout of the next forward.

        Args:
            key: Of the random numbers.
            first_row: The first of the forward's rows in the batch of all ranks.
            shape: Not needed: each tensor has its own.
            device: Of the state; None: where the last forward was.
        """
        if device is None and self.state is not None:
            device = self.state.place.device
        self.state = StreamState(dropout_state(key, first_row, device=device), None)

    def begin(self, num_rows: int) -> None:
        """Note how many rows the forward at hand has.

        Args:
            num_rows: As the model is given them; its modules may see [num_rows * tokens, ...].
        """
        if self.state is not None:
            self.state = StreamState(self.state.place, num_rows)

    def drop(self, x: Tensor, p: float, *, of_rows: bool = False) -> Tensor:
        """keep / (1 - p) * x.

        Args:
            x: [rows, ...], or this rank's heads [rows, heads, ...] or columns [..., columns]. Under
                context parallelism [rows, own tokens, ...], [rows * own tokens, ...], or what
                belongs to whole rows.
            p: Probability with which an element is dropped.
            of_rows: Whether x belongs to whole rows, whatever its shape.

        Raises:
            RuntimeError: No state was set.
            ValueError: Under context parallelism, for a tensor in which the own tokens are not the
                second dimension.
        """
        if x.is_meta:  # a placeholder asks for the shape alone
            return x
        if self.context is not None and self.state is not None and not of_rows:
            lead = self._tokens_in(tuple(x.shape))
            if lead is not None:
                return self._drop_tokens(x, p, *lead)
        state, row, stride = self._counters(tuple(x.shape), x.device)
        return dropout(x, p=p, state=state, row=row, row_stride=stride)

    def _tokens_in(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """(how many leading dims are those of tokens, the number of the first token among the own
        ones of all rows); None where a tensor has none."""
        assert self.state is not None
        assert self.context is not None
        rows, own = self.state.num_rows, self.context.own
        if rows is None or own is None:
            return None
        if self.tokens is not None and len(shape) == 2:
            return 1, self.tokens.first_of(shape[0])
        if len(shape) >= 3 and shape[0] in (rows, 1) and shape[1] == own:
            return 2, 0
        if shape[0] == rows * own and own > 1:
            return 1, 0
        if own > 1 and own in shape[1:]:
            raise ValueError(
                f"dropout of a tensor {list(shape)}, in which the {own} tokens of each row that "
                "this rank has are not the second dimension: under context parallelism it drops "
                "from [rows, tokens, ...] alone"
            )
        return None

    @disable_dynamo
    def _drop_tokens(self, x: Tensor, p: float, lead: int, first: int) -> Tensor:
        """`drop` of own tokens, which have the counters of their places in whole rows.

        Args:
            x: As of `drop`.
            p: As of `drop`.
            lead: How many leading dims are those of tokens.
            first: The number of the first token among the own ones of all rows.
        """
        assert self.state is not None
        assert self.context is not None
        assert self.context.own is not None
        place, rows = self.state
        key, first_row = place.to(x.device)
        shape, count = tuple(x.shape), math.prod(x.shape[:lead])
        part = self._part(shape)
        if part is None or part.dim != len(shape) - 1 or part.dim < lead:
            width, start, inner = (
                max(math.prod(shape[lead:]), 1),
                0,
                max(math.prod(shape[lead:]), 1),
            )
        else:  # columns of the whole
            width, start, inner = part.whole, part.start, shape[-1]
        each = max(math.prod(shape[lead:]), 1) // inner  # of these in a token
        length = self.context.counted(self.context.own)
        before = 0 * first_row  # elements of the rows before this rank's; one for all has none
        if lead == 1 or shape[0] == rows:
            before = first_row * (length * each * width)
        flat = x.reshape(count * each, inner)
        parts = [
            dropout(
                flat[at * each : (at + number) * each],
                p=p,
                state=torch.stack((key, before + token * each * width + start)),
                row=inner,
                row_stride=step * width,
            )
            for at, number, token, step in self._stretches(first, count, single=each > 1)
        ]
        self.state = self.state._replace(place=torch.stack((key + 1, first_row)))
        return torch.cat(parts).view(shape)

    def _stretches(
        self, first: int, count: int, *, single: bool
    ) -> Iterator[tuple[int, int, int, int]]:
        """As `TokenContext.runs`, of the own tokens; `single`: of one token each, where one is
        several rows of columns."""
        assert self.context is not None
        assert self.context.own is not None
        own = self.context.own
        runs = self.context.runs(
            own * self.context.ranks.size, first, count, self.context.counted(own)
        )
        for at, number, token, step in runs:
            if not single or step == 1:
                yield at, number, token, step
            else:
                for i in range(number):
                    yield at + i, 1, token + i * step, 1

    def of_own_weights(self, q: Tensor, p: float) -> AttentionDropout:
        """The dropout of the attention weights of own tokens: for attention over ranks.

        Args:
            q: [rows, own tokens, heads, K].
            p: Probability with which a weight is dropped.

        Raises:
            RuntimeError: No state was set.
        """
        assert self.context is not None
        T = self.context.counted(q.shape[1])
        found = self.of_weights((q.shape[0], q.shape[2], T, T), p, q.device)
        return replace(found, num_queries=T, num_keys=T)

    def of_weights(
        self, shape: tuple[int, ...], p: float, device: torch.device
    ) -> AttentionDropout:
        """The dropout that `drop` does of attention weights, for an operation that never makes
        them.

        Args:
            shape: [rows, heads, T, S] of the weights, or this rank's heads.
            p: Probability with which a weight is dropped.
            device: Of the weights.

        Raises:
            RuntimeError: No state was set.
        """
        if device.type == "meta":
            state = torch.empty(2, dtype=torch.int64, device=device)
            return AttentionDropout(p, state, row_stride=0)
        state, _, stride = self._counters(shape, device)
        return AttentionDropout(p, state, row_stride=stride)

    def _counters(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, int, int]:
        """(key and counter of the first element, elements of a row, from a row to the next) of a
        tensor of this shape; the next one draws with the next key."""
        if self.state is None:
            raise RuntimeError(
                "this dropout has no state: call set_keyed_dropout(...) before each forward, or "
                "model.eval()"
            )
        part = self._part(shape)
        dim, start, whole = part or RankPart(1, 0, 0)
        row = math.prod(shape[dim:])
        stride = row if part is None else row // max(shape[dim], 1) * whole
        if self.tokens is not None and len(shape) == 2:
            row_of_batch = math.prod(self.tokens.shape[1:]) * stride
            start_of_rows = self.tokens.first_of(shape[0]) * stride
        else:
            row_of_batch = _per_row(shape[0], math.prod(shape[:dim]) * stride, self.state.num_rows)
            start_of_rows = 0
        key, first_row = self.state.place.to(device)
        first = first_row * row_of_batch + start_of_rows + start * math.prod(shape[dim + 1 :])
        self.state = self.state._replace(place=torch.stack((key + 1, first_row)))
        return torch.stack((key, first)), max(row, 1), max(stride, 1)

    def _part(self, shape: tuple[int, ...]) -> RankPart | None:
        """Which part of each row a tensor is; None for all of it."""
        if self.rows is None or self.columns_open is None or not self.columns_open.value:
            return None
        length, dim = self.rows.length, self.rows.dim
        assert dim is not None
        whole = self.rows.global_shape[dim]
        if len(shape) == 4 and length % shape[1] == 0:
            width = length // shape[1]
            return RankPart(1, self.rows.start // width, whole // width)
        if shape[-1] == length:
            return RankPart(len(shape) - 1, self.rows.start, whole)
        return None


def _per_row(length: int, whole: int, num_rows: int | None) -> int:
    """How many of the `whole` elements, with those of other ranks, one row of the batch has.

    Args:
        length: Of the tensor's first dimension.
        whole: Elements of the tensor.
        num_rows: Of the forward.
    """
    if num_rows is not None and length != num_rows:
        if length == 1:  # one for all rows, such as positions
            return 0
        if length % num_rows == 0:  # tokens
            return whole // num_rows
    return whole // max(length, 1)
