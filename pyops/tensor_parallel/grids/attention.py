"""Multi-head attention on a grid: the heads over the columns, whole sequences over the rows, so
that nothing is sent between the projections.

x --> q k v of own heads and sequences --> softmax(q k^T scale) v --> output, cut as x

The weights lie as those of `ParallelAttention` do, for H heads of width K in G groups: qkv [H 3 K,
D] where G = H, else q [H K, D] and kv [G 2 K, D]; output [D, H K].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyops.ops.layers.dropout import dropout_state
from pyops.ops.layers.rotary import rotary as turn
from pyops.tensor_parallel.functional.keywords import check_probability
from pyops.tensor_parallel.functional.scores import Core, ScoreDropout, Seen
from pyops.tensor_parallel.grids.grid import Cuts, Grid
from pyops.tensor_parallel.grids.linear import GridLinear, GridLinearConfig
from pyops.tensor_parallel.layers.layer_config import AttentionConfig

__all__ = ["GridAttention"]


class GridAttention(nn.Module):
    """x [b, T, dim / columns] -> y of the same cuts.

    Args:
        dim: D, the width of the whole x.
        num_heads: H, the number of heads of queries.
        config: see `AttentionConfig`; None: its defaults. Cross-attention and patterns are those of
            one dimension alone.
        grid: the ranks that share the heads and the sequences.
        form: of the product of `output`, see `GridLinearConfig`.
        cuts: of x; None: those between the blocks of a model.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads or groups that the ranks of the columns do not divide, widths of all heads
            that the grid does not divide, or an option that there is not on a grid.
    """

    state: Tensor | None
    qkv: GridLinear
    q: GridLinear
    kv: GridLinear

    def __init__(
        self,
        dim: int,
        num_heads: int,
        config: AttentionConfig | None = None,
        *,
        grid: Grid,
        form: str = "ab",
        cuts: Cuts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = config or AttentionConfig()
        G = num_heads if config.num_kv_heads is None else config.num_kv_heads
        K = dim // num_heads if config.head_dim is None else config.head_dim
        self.grid, self.cuts = grid, cuts or grid.cuts
        self.behind, inner = self.cuts, grid.behind(self.cuts)
        _check_config(config)
        _check_heads(num_heads, G, K, grid, inner)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, G, K
        self.scale = K**-0.5 if config.scale is None else config.scale
        self.causal, self.dropout, self.interleaved = (
            config.causal,
            config.dropout,
            config.interleaved,
        )
        self.merged, self.inner = num_heads == G, inner
        prefix = config.name + "." if config.name else ""
        where: dict[str, Any] = {"grid": grid, "device": device, "dtype": dtype}

        def projection(out: int, name: str) -> GridLinear:
            options = GridLinearConfig(seed=config.seed, name=prefix + name, std=config.std)
            return GridLinear(dim, out, bias=config.bias, config=options, cuts=self.cuts, **where)

        if self.merged:
            self.qkv = projection(G * 3 * K, "qkv")
        else:
            self.q, self.kv = projection(num_heads * K, "q"), projection(G * 2 * K, "kv")
        output = GridLinearConfig(
            form=form,
            skip_bias=config.skip_bias,
            seed=config.seed,
            name=prefix + "output",
            std=config.std if config.out_std is None else config.out_std,
        )
        bias = config.bias if config.out_bias is None else config.out_bias
        self.output = GridLinear(num_heads * K, dim, bias=bias, config=output, cuts=inner, **where)
        self.core = Core()
        self.register_buffer("state", None, persistent=False)

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """Sets the dropout of the next forward, over sequences [first_row, first_row + shape[0]),
        all ranks' together; see `set_dropout`.

        Args:
            key: Of the random numbers.
            first_row: The first of these sequences in the batch of all ranks.
            shape: (B, T) of the forward.
            device: Of the state; None: the parameters'.
        """
        start = self.grid.rows(shape[0], self.inner)[0]
        self.state = dropout_state(key, first_row + start, device=device)

    def forward(
        self,
        x: Tensor,
        *,
        shape: tuple[int, int] | None = None,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past: object | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attention of own sequences to themselves.

        Args:
            x: [b, T, dim / columns], this rank's block.
            shape: (B, T); x says what is needed of it.
            mask: int32 [B, T] of all sequences, the same on every rank: a token sees the tokens of
                its own document alone; -1 is padding.
            rotary: (cos, sin), fp32 [T, R / 2] or [B, T, R / 2] of all sequences.
            past: None: there are no kept keys on a grid.

        Returns:
            y; with config.skip_bias (y without the output's bias, this rank's part of it or None).

        Raises:
            ValueError: x of other dimensions, a mask that is none of documents, or kept keys.
        """
        if x.dim() != 3:
            raise ValueError(f"x is {list(x.shape)}; attention takes [b, T, dim / columns]")
        if past is not None:
            raise ValueError("attention on a grid keeps no keys and values; leave past out")
        if mask is not None and mask.dtype != torch.int32:
            raise ValueError(
                f"mask is {mask.dtype}; on a grid it is documents, int32 [B, T] of all sequences"
            )
        documents = mask
        q, k, v = self._project(x)
        if rotary is not None:
            tables = [self._own(table) if table.dim() == 3 else table for table in rotary]
            q, k = (turn(each, *tables, interleaved=self.interleaved) for each in (q, k))
        if documents is not None:
            documents = self.grid.take_rows(documents, self.inner, fill=-1)
        y = self.core(
            q,
            k,
            v,
            scale=self.scale,
            seen=Seen(self.causal, None, documents),
            dropout=self._dropout(x.shape[1]),
        )
        result: Tensor | tuple[Tensor, Tensor | None] = self.output(y)
        return result

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, T, own heads, K], k and v [b, T, own groups, K]."""
        if self.merged:
            q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(3)
            return q, k, v
        k, v = self.kv(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(3)
        return self.q(x).unflatten(-1, (-1, self.head_dim)), k, v

    def _own(self, table: Tensor) -> Tensor:
        """A table of all sequences, or of one for all, as this rank's sequences take it."""
        return table if len(table) == 1 else self.grid.take_rows(table, self.inner)

    def _dropout(self, T: int) -> ScoreDropout | None:
        """The dropout of own scores, whose counters are those of [rows of the global batch, H, T,
        T]."""
        if not self.training or self.dropout == 0.0:
            return None
        if self.state is None:
            raise RuntimeError(
                "this attention has no dropout state: call set_dropout(model, ...) before each "
                "forward, or eval()"
            )
        key, row = self.state.unbind()
        part, parts = self.grid.position[self.inner.columns], self.grid.axes[self.inner.columns]
        first = (row * self.num_heads + part * self.num_heads // parts) * (T * T)
        return ScoreDropout(self.dropout, torch.stack([key, first]), self.num_heads * T * T)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, groups={self.num_kv_heads}, head_dim={self.head_dim}"


def _check_config(config: AttentionConfig) -> None:
    check_probability("dropout", config.dropout)
    if config.cross or config.pattern is not None:
        what = "cross=True" if config.cross else f"pattern={config.pattern}"
        raise ValueError(
            f"attention on a grid has no {what}; leave it out, or use ParallelAttention"
        )


def _check_heads(H: int, G: int, K: int, grid: Grid, cuts: Cuts) -> None:
    """ValueError for heads that the ranks of the columns can't share."""
    if H < 1 or G < 1 or H % G:
        raise ValueError(f"num_kv_heads is {G}, which does not divide num_heads = {H}")
    ranks = grid.axes[cuts.columns]
    name, groups = ("num_heads", H) if G == H else ("num_kv_heads", G)
    if groups % ranks:
        raise ValueError(
            f"{name} is {groups}, which the {ranks} ranks along {cuts.columns!r} of a {grid.mode} "
            f"grid do not divide; choose a multiple of {ranks}, or a smaller grid"
        )
    for width, what in ((H * K, "num_heads"), (2 * G * K, "2 num_kv_heads")):
        if width % grid.unit:
            raise ValueError(
                f"{what} x head_dim is {width}, but a {grid.mode} grid of "
                f"{' x '.join(map(str, grid.shape))} cuts it into multiples of {grid.unit}"
            )
