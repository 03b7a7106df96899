"""How a model lies on its ranks: the group that shares its layers, and its tokens as a rank holds
them between blocks.

[B, T, D] on every rank          or, of B T = 6 tokens on 4 ranks       rank 0  0 1
                                 with sequence parallelism              rank 1  2 3
                                                                        rank 2  4 5
                                                                        rank 3  two rows of padding

On a grid of ranks (`pyops.tensor_parallel.grids`) a rank has blocks [b, T, D / columns] of its own
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.models.context import ContextCore, ContextDropout, ContextMLP, TokenContext
from pyops.tensor_parallel import (
    AttentionConfig,
    Dropout,
    LayerNorm,
    MLPConfig,
    ParallelAttention,
    ParallelMLP,
    Ranks,
    RanksLike,
    RMSNorm,
)
from pyops.tensor_parallel.functional.regions import gather_tokens, scatter_tokens
from pyops.tensor_parallel.grids import (
    Grid,
    GridAttention,
    GridDropout,
    GridLayerNorm,
    GridMLP,
    GridRMSNorm,
)
from pyops.tensor_parallel.grids.regions import own_block, whole

__all__ = ["AddedEmbedding", "ModelLayout", "Shape"]

Shape = tuple[int, int]


@dataclass(frozen=True)
class ModelLayout:
    """How a model lies on its ranks."""

    ranks: Ranks
    """The ranks that share the layers."""
    sequence_parallel: bool = False
    """Tokens are cut over the ranks between blocks."""
    device: torch.device | str | None = None
    """Of the parameters."""
    dtype: torch.dtype | None = None
    """Of the parameters."""
    shared_rows: TokenContext | None = None
    """How ranks of context parallelism share out the tokens of rows; None: every rank has all."""
    grid: Grid | None = None
    """The ranks as a grid that cuts activations, too; None: they cut weights alone."""

    @classmethod
    def of(
        cls,
        group: RanksLike | Grid,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        shared_rows: TokenContext | None,
    ) -> ModelLayout:
        """Of a model that was given these arguments.

        Args:
            group: The ranks that share the layers, or a grid of them.
            sequence_parallel, device, dtype, shared_rows: See the fields.

        Raises:
            ValueError: A grid, and another way to share out what is between the layers.
        """
        if not isinstance(group, Grid):
            return cls(Ranks.of(group), sequence_parallel, device, dtype, shared_rows)
        if sequence_parallel or shared_rows is not None:
            what = "sequence_parallel=True" if sequence_parallel else "context"
            raise ValueError(
                f"the model was given a grid and {what}; a grid cuts what is between the layers "
                f"itself: leave {what} out"
            )
        return cls(group.ranks, device=device, dtype=dtype, grid=group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLayout:
        return self  # a copy of a model communicates with the same ranks

    @property
    def context(self) -> TokenContext | None:
        """`shared_rows`, unless each rank has all tokens for a while."""
        rows = self.shared_rows
        return None if rows is None or rows.paused else rows

    @property
    def shared(self) -> bool:
        """Whether a rank holds only some of the tokens."""
        return self.sequence_parallel and self.ranks.size > 1

    @property
    def parallel(self) -> dict[str, Any]:
        """The keyword arguments that all layers of pyops.tensor_parallel take."""
        return {
            "group": self.ranks,
            "sequence_parallel": self.sequence_parallel,
            "device": self.device,
            "dtype": self.dtype,
        }

    @property
    def _second(self) -> str:
        """The form of a block's second products that sends the fewest bytes; in three dimensions
        there is no difference."""
        return "abt" if self.grid is not None and self.grid.flat else "ab"

    @property
    def on_blocks(self) -> dict[str, Any]:
        """The keyword arguments that all layers of a grid take."""
        return {"grid": self.grid, "device": self.device, "dtype": self.dtype}

    def norm(self, kind: str, dim: int, *, eps: float, bias: bool = True) -> nn.Module:
        """ "layernorm" or "rmsnorm"; the latter has no bias."""
        if self.grid is not None:
            if kind == "rmsnorm":
                return GridRMSNorm(dim, eps=eps, **self.on_blocks)
            return GridLayerNorm(dim, eps=eps, bias=bias, **self.on_blocks)
        if kind == "rmsnorm":
            return RMSNorm(dim, eps=eps, **self.parallel)
        return LayerNorm(dim, eps=eps, bias=bias, **self.parallel)

    def dropout(self, p: float, width: int) -> Dropout | GridDropout:
        """Of tokens as a rank holds them."""
        if self.grid is not None:
            return GridDropout(p, width=width, grid=self.grid)
        where: dict[str, Any] = {
            "group": self.ranks,
            "sequence_parallel": self.sequence_parallel,
        }
        if self.shared_rows is not None:
            return ContextDropout(p, width=width, context=self.shared_rows, **where)
        return Dropout(p, width=width, **where)

    def self_attention(self, dim: int, num_heads: int, config: AttentionConfig) -> nn.Module:
        """Of tokens as a rank holds them, to those of all ranks of context parallelism."""
        if self.grid is not None:
            return GridAttention(dim, num_heads, config, form=self._second, **self.on_blocks)
        return self.attend_over_ranks(ParallelAttention(dim, num_heads, config, **self.parallel))

    def block_mlp(self, dim: int, hidden: int, config: MLPConfig) -> nn.Module:
        """Of a block, without dropout inside."""
        if self.grid is not None:
            return GridMLP(dim, hidden, config, form=self._second, **self.on_blocks)
        return ParallelMLP(dim, hidden, config, **self.parallel)

    def attend_over_ranks(self, attention: ParallelAttention) -> ParallelAttention:
        """The same layer, which sees the tokens of all ranks of context parallelism."""
        if self.shared_rows is not None:
            over_ranks: Any = ContextCore(self.shared_rows, cross=attention.cross)
            attention.core = over_ranks
        return attention

    def mlp(self, dim: int, hidden: int, config: MLPConfig) -> ParallelMLP:
        """Of tokens as a rank holds them."""
        if self.shared_rows is not None:
            return ContextMLP(dim, hidden, config, context=self.shared_rows, **self.parallel)
        return ParallelMLP(dim, hidden, config, **self.parallel)

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """The tokens, or targets, that this rank of context parallelism holds of whole rows."""
        return x_BT if self.context is None else self.context.row(x_BT.shape[1]).shard(x_BT)

    def own_shape(self, shape: Shape | None) -> Shape | None:
        """(B, n) of the own tokens of whole rows (B, T)."""
        if shape is None or self.context is None:
            return shape
        return shape[0], self.context.row(shape[1]).order.tokens_of_a_rank

    def own_places(self, own: int, device: torch.device) -> Tensor:
        """int64 [n]: the places of the own tokens, of which there are so many in a row."""
        places = self.shared_places(own, device)
        return torch.arange(own, device=device) if places is None else places

    def shared_places(self, own: int, device: torch.device) -> Tensor | None:
        """As `own_places`; None where every rank has all tokens."""
        return None if self.context is None else self.context.row_of(own).index(device=device)

    def first_token(self, x: Tensor, shape: Shape | None) -> Tensor:
        """[B, D]: the first token of each row, on every rank, of x as a rank holds it; shape: (B,
        T). What is computed of it goes through `once`. Of a grid with the padding of the width."""
        if self.grid is not None:
            batch = len(x) * self.grid.count(self.grid.cuts.rows) if shape is None else shape[0]
            width = x.shape[-1] * self.grid.axes[self.grid.cuts.columns]
            return whole(x[:, :1], self.grid, batch=batch, width=width)[:, 0]
        x = self.whole(x, self.own_shape(shape), duplicated=True)
        if self.context is None:
            return x[:, 0]
        return self.context.row_of(x.shape[1]).on_every_rank(x)

    def once(self, y: Tensor, shape: Shape) -> Tensor:
        """y, computed alike on every rank of `first_token`: its gradient is that of one of the
        ranks that share rows, so that gradients are summands."""
        return y if self.context is None else self.context.row(shape[1]).once(y)

    def summand(self, total: Tensor, shape: Shape) -> Tensor:
        """A sum of losses of `once`: on one of the ranks that share rows, and 0 on others."""
        if self.context is None or self.context.row(shape[1]).holds(0):
            return total
        return total * 0.0

    def linear(self, in_features: int, out_features: int, *, per_token: bool = True) -> nn.Linear:
        """A linear layer that every rank holds whole.

        Args:
            per_token: Applied to tokens as a rank holds them.
        """
        layer = nn.Linear(in_features, out_features, device=self.device, dtype=self.dtype)
        if per_token:
            layer.placements = {name: self.placement(p) for name, p in layer.named_parameters()}  # type: ignore[assignment]
        return layer

    def parameter(self, *shape: int) -> nn.Parameter:
        """Without values yet."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype))

    def placement(self, parameter: Tensor) -> Placement:
        """Of a parameter that every rank holds whole and applies to its tokens: the gradient there
        is of these alone."""
        return Placement.whole(
            tuple(parameter.shape),
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            partial=self.sequence_parallel,
        )

    def take(self, x_BTX: Tensor) -> Tensor:
        """This rank's tokens of those that every rank has; its block on a grid."""
        if self.grid is not None:
            return own_block(x_BTX, self.grid)
        return scatter_tokens(x_BTX.flatten(0, 1), group=self.ranks) if self.shared else x_BTX

    def take_index(self, index_BT: Tensor) -> Tensor:
        """As `take`, of whole numbers, of which there is one for each token."""
        if self.grid is not None:
            return self.grid.take_rows(index_BT)
        if not self.shared:
            return index_BT
        rank, each = self.ranks.rank, self.ranks.rows_per_rank(index_BT.numel())
        missing = each * self.ranks.size - index_BT.numel()
        return nn.functional.pad(index_BT.flatten(), (0, missing))[rank * each : (rank + 1) * each]

    def whole(self, x: Tensor, shape: Shape | None, *, duplicated: bool = False) -> Tensor:
        """[B, T, D] of all tokens on every rank, of x as a rank holds it; shape: (B, T), needed
        where they are shared out.

        Args:
            duplicated: Every rank does the same with it; otherwise each does a share of the work,
                and gradients are summed.
        """
        if not self.shared:
            return x
        if shape is None:
            raise ValueError(
                "under sequence parallelism a layer of the model needs shape=(B, T) of the tokens"
            )
        result: Tensor = gather_tokens(
            x, tokens=shape[0] * shape[1], duplicated=duplicated, group=self.ranks
        ).unflatten(0, shape)
        return result


class AddedEmbedding(nn.Module):
    """Rows that are added to tokens: learned positions, token types. forward(index of tokens as a
    rank holds them) -> rows."""

    def __init__(self, length: int, dim: int, *, layout: ModelLayout) -> None:
        super().__init__()
        self.weight = layout.parameter(length, dim)
        self.placements = {"weight": layout.placement(self.weight)}

    def forward(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self.weight)
