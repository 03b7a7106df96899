"""KeyedDropout and KeyedDropPath: the layers that take the place of a model's dropout layers, and
draw from a KeyedStream."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyops.flat import Placement
from pyops.models.context import TokenContext
from pyops.parallel.dropout.keyed_stream import ColumnsOpen, KeyedStream
from pyops.tensor_parallel.convert.region_hooks import Tokens

__all__ = ["KeyedDropPath", "KeyedDropout"]


class KeyedDropout(KeyedStream):
    """forward(x) -> dropout(x), in the place of a torch.nn.Dropout.

    Args:
        p: Probability with which an element is dropped.
        rows, columns_open, tokens, context: See `KeyedStream`.
    """

    def __init__(
        self,
        p: float,
        *,
        rows: Placement | None = None,
        columns_open: ColumnsOpen | None = None,
        tokens: Tokens | None = None,
        context: TokenContext | None = None,
    ) -> None:
        super().__init__(rows, columns_open, tokens, context)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """dropout(x) in train mode; x itself in eval mode.

        Args:
            x: [rows, ...].
        """
        return self.drop(x, self.p) if self.training and self.p > 0.0 else x

    def extra_repr(self) -> str:
        return f"p={self.p}"


class KeyedDropPath(KeyedDropout):
    """forward(x) -> x, of which whole rows of the batch fall, in the place of a DropPath (Huang et
    al., Stochastic Depth, arXiv:1603.09382).

    Args:
        p: Probability with which a row is dropped.
        rows, columns_open, tokens, context: See `KeyedStream`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The rows that are kept times 1 / (1 - p), and zeros, in train mode; x itself in eval
        mode.

        Args:
            x: [rows, ...], or rows of tokens [n, D] under sequence parallelism.
        """
        if not self.training or not self.p > 0.0:
            return x
        if self.tokens is None or x.dim() > 2:
            ones = x.new_ones(x.shape[0], *[1] * (x.dim() - 1))
            return x * self.drop(ones, self.p, of_rows=True)
        rows, length = self.tokens.shape[0], math.prod(self.tokens.shape[1:])
        kept = self.drop(x.new_ones(rows, 1, 1), self.p, of_rows=True).view(rows)
        token = self.tokens.first_of(len(x)) + torch.arange(len(x), device=x.device)
        return x * kept[(token // length).clamp(max=rows - 1)][:, None]
