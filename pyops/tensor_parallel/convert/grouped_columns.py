"""Queries, keys and values of grouped heads that lie in one matrix, cut by groups.

as the model has them     q0 q1 q2 q3 | k0 k1 | v0 v1          4 heads in 2 groups
as the whole is laid out  q0 q1 k0 v0 | q2 q3 k1 v1            so a rank's part is one range of rows
what rank 0 computes      q0 q1 | k0 | v0                      as the model's code takes it apart
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.tensor_parallel.convert.head_counts import HeadCounts
from pyops.tensor_parallel.layers.layer_config import ColumnConfig
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear

__all__ = ["GroupedColumns"]


class GroupedColumns(ColumnParallelLinear):
    """A ColumnParallelLinear of (heads + 2 groups) * K outputs, laid out by groups; its results are
    packed again."""

    def __init__(self, in_features: int, heads: HeadCounts, **where: Any) -> None:
        each = heads.num_heads // heads.num_kv_heads + 2
        config = ColumnConfig(unit=each * heads.head_dim, seed=None)
        super().__init__(
            in_features, each * heads.num_kv_heads * heads.head_dim, config=config, **where
        )
        self.heads = heads

    def by_group(self, whole: Tensor) -> Tensor:
        """Rows as the model has them -> laid out by groups."""
        G, K = self.heads.num_kv_heads, self.heads.head_dim
        q, k, v = whole.split([self.heads.num_heads * K, G * K, G * K])
        return torch.cat([each.unflatten(0, (G, -1)) for each in (q, k, v)], 1).flatten(0, 1)

    def as_packed(self, whole: Tensor) -> Tensor:
        """The way back of `by_group`."""
        return _packed(whole, self.heads, 0)

    def forward(self, x: Tensor) -> Any:
        return _packed(super().forward(x), self.heads, -1)  # type: ignore[arg-type]


def _packed(y: Tensor, heads: HeadCounts, dim: int) -> Tensor:
    """Groups along `dim` -> all queries, all keys, all values."""
    y = y.movedim(dim, 0).unflatten(
        0, (-1, heads.num_heads // heads.num_kv_heads + 2, heads.head_dim)
    )
    parts = y.split([heads.num_heads // heads.num_kv_heads, 1, 1], 1)
    return torch.cat([part.flatten(0, 2) for part in parts]).movedim(0, dim)
