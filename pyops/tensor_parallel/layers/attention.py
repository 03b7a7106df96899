"""Multi-head attention cut over ranks by heads: one sum over ranks forward, one backward.

    x --> q k v of own heads (columns) --> softmax(q k^T scale + bias) v
      --> output (rows) --> sum, + bias

How the weights lie, for H heads of width K in G groups that share keys and values:

    self-attention, G = H      qkv.weight [H 3 K, D]      rows (head; query, key, value; K)
    self-attention, G < H      q.weight   [H K, D]        rows (head; K), and
    and cross-attention        kv.weight  [G 2 K, D]      rows (group; key, value; K), applied
                                                          to the memory in cross-attention
    output.weight              [D, H K]                   columns (head; K)

All are cut by whole groups. Where there are fewer groups than ranks, each group's key and value are
on ranks / G ranks, which share out its heads; each has a part of the gradient of kv, as its
placement says, that `sync_partial_grads` sums. Where the ranks do not divide the groups, the last
ranks' are padded: a head of zeros adds nothing and learns nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pyops.attention import Pattern, PatternLayouts
from pyops.attention.layouts import shared_layouts
from pyops.flat import ChannelPart, ChannelSet
from pyops.flat.channels import written
from pyops.ops.attention import BlockLayout
from pyops.ops.layers.dropout import dropout_state
from pyops.ops.layers.rotary import rotary as turn
from pyops.tensor_parallel.functional.keywords import check_probability, refuse_keywords
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.functional.scores import Core, DistanceBias, ScoreDropout, Seen
from pyops.tensor_parallel.layers.head_groups import check_heads
from pyops.tensor_parallel.layers.kv_cache import KVCache
from pyops.tensor_parallel.layers.layer_config import AttentionConfig, ColumnConfig, RowConfig
from pyops.tensor_parallel.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_outputs,
)
from pyops.tensor_parallel.layers.row_cache import MemoryRows, RowCache

__all__ = ["ParallelAttention"]


Shape = tuple[int, int]


class ParallelAttention(nn.Module):
    """x [B, T, dim] -> [B, T, dim]; under sequence parallelism this rank's rows [n, dim] of the B T
    tokens to the same.

    Args:
        dim: D, the width of x.
        num_heads: H, the number of heads of queries.
        config: see `AttentionConfig`; None: its defaults.
        group: the ranks that share the heads, see `RanksLike`; None: the default process group.
        sequence_parallel: whether tokens are cut over the ranks outside of the layer.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: heads that are not whole groups, that are fewer than the ranks, or whose groups
            the ranks can't share (with the sizes that can); causal cross-attention; a dropout that
            is no probability.
        TypeError: `group` is no group that this rank is in.
    """

    state: Tensor | None
    qkv: ColumnParallelLinear
    q: ColumnParallelLinear
    kv: ColumnParallelLinear

    def __init__(
        self,
        dim: int,
        num_heads: int,
        config: AttentionConfig | None = None,
        *,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: NoReturn,
    ) -> None:
        super().__init__()
        if moved:
            refuse_keywords("ParallelAttention", moved, AttentionConfig)
        config = config or AttentionConfig()
        G = num_heads if config.num_kv_heads is None else config.num_kv_heads
        ranks = Ranks.of(group)
        _check(dim, num_heads, G, config.head_dim, ranks.size)
        if config.causal and config.cross:
            raise ValueError(
                "causal=True has no meaning for cross-attention, whose memory has no "
                "order with x; pass a mask"
            )
        if config.pattern is not None and config.cross:
            raise ValueError(
                f"pattern is {config.pattern}, but cross-attention has keys of another length; "
                "leave it out there"
            )
        check_probability("dropout", config.dropout)
        K = dim // num_heads if config.head_dim is None else config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, G, K
        self.per_group = num_heads // G
        self.scale = K**-0.5 if config.scale is None else config.scale
        self.causal, self.cross = config.causal, config.cross
        self.dropout, self.interleaved, self.ranks = config.dropout, config.interleaved, ranks
        self.copies = max(1, ranks.size // G)
        self.merged = not config.cross and self.per_group == 1
        where: dict[str, Any] = {
            "group": ranks,
            "sequence_parallel": sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        self._make_projections(dim, config, where)
        self.core = Core()
        self.plan = self.output.plan
        place = self.output.placements["weight"]
        self.first_head, self.local_heads = place.start // K, place.length // K
        self.layouts = None if config.pattern is None else self._layouts(config.pattern, config)
        self.register_buffer("state", None, persistent=False)

    def _make_projections(self, dim: int, config: AttentionConfig, where: dict[str, Any]) -> None:
        """The linear layers; where: their group, device and dtype."""
        H, G, K = self.num_heads, self.num_kv_heads, self.head_dim
        # Where ranks share a group, its heads are dealt out one by one.
        unit = K if self.copies > 1 else self.per_group * K
        prefix = config.name + "." if config.name else ""
        shared: dict[str, Any] = {
            "reduce": config.reduce,
            "overlap": config.overlap,
            "seed": config.seed,
        }

        def columns(
            size: int, out: int, name: str, *, unit: int, copies: int = 1
        ) -> ColumnParallelLinear:
            column = ColumnConfig(
                name=prefix + name, std=config.std, unit=unit, copies=copies, **shared
            )
            return ColumnParallelLinear(size, out, bias=config.bias, config=column, **where)

        if self.merged:
            self.qkv = columns(dim, G * 3 * K, "qkv", unit=3 * K)
        else:
            inner = dim if not config.cross or config.memory_dim is None else config.memory_dim
            self.q = columns(dim, H * K, "q", unit=unit)
            self.kv = columns(inner, G * 2 * K, "kv", unit=2 * K, copies=self.copies)
        output = RowConfig(
            unit=unit,
            skip_bias=config.skip_bias,
            name=prefix + "output",
            std=config.std if config.out_std is None else config.out_std,
            **shared,
        )
        bias = config.bias if config.out_bias is None else config.out_bias
        self.output = RowParallelLinear(H * K, dim, bias=bias, config=output, **where)

    def channels(self) -> list[ChannelSet]:
        """Of each group of heads that share keys and values: the channels of values, which are
        columns of output, and those of queries and keys, whose scores do not depend on their order
        unless rotary positions turn them (the model knows)."""
        K, found = self.head_dim, []
        for g in range(self.num_kv_heads):
            heads = [h * K for h in range(g * self.per_group, (g + 1) * self.per_group)]
            if self.merged:
                first = 3 * g * K
                queries = written("qkv", starts=[first], bias=self.qkv.bias is not None)
                keys, values = (
                    written("qkv", starts=[first + i * K], bias=self.qkv.bias is not None)
                    for i in (1, 2)
                )
            else:
                queries = written("q", starts=heads, bias=self.q.bias is not None)
                keys, values = (
                    written("kv", starts=[(2 * g + i) * K], bias=self.kv.bias is not None)
                    for i in (0, 1)
                )
            output = ChannelPart("output.weight", 1, tuple(heads), reads=True)
            found.append(ChannelSet(f"values.{g}", K, (*values, output)))
            found.append(ChannelSet(f"scores.{g}", K, (*queries, *keys)))
        return found

    def _layouts(self, pattern: Pattern, config: AttentionConfig) -> PatternLayouts:
        """Of the heads of this rank, those of padding among them."""
        heads = self.output.weight.shape[1] // self.head_dim
        return shared_layouts(pattern, heads, self.first_head, config.pattern_block, config.causal)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws all weights anew from the streams (seed, name + ".qkv.weight") and so on; biases
        become zero."""
        for key, layer in self.named_children():
            if layer is self.core:
                continue
            layer.reset_parameters(seed=seed, name=f"{name}.{key}" if name else key)  # type: ignore[operator]

    def set_dropout_state(
        self, *, key: int, first_row: int, shape: Shape, device: torch.device | None = None
    ) -> None:
        """Sets the dropout of the next forward to (key, first sequence); see `set_dropout`.

        Args:
            key: Of the random numbers.
            first_row: The first of these sequences in the batch of all ranks.
            shape: (B, T) of the forward.
            device: Of the state; None: the parameters'.
        """
        self.state = dropout_state(key, first_row, device=device)

    def forward(
        self,
        x: Tensor,
        *,
        memory: Tensor | None = None,
        shape: Shape | None = None,
        memory_shape: Shape | None = None,
        mask: Tensor | None = None,
        bias: Tensor | DistanceBias | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past: KVCache | RowCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attention of x to itself, or to memory.

        Args:
            x: [B, T, dim]; under sequence parallelism this rank's rows [n, dim] of the B T tokens.
            memory: the encoder's output, for cross-attention: [B, S, memory_dim], or rows of it.
            shape: (B, T), needed under sequence parallelism.
            memory_shape: (B, S), needed for cross-attention under sequence parallelism.
            mask: bool [B, S] or [B, T, S], True where a key may be seen; or int32 [B, T], which
                document each token belongs to, of which it sees the tokens alone, and -1 for
                padding.
            bias: [1 or B, own heads, T, S], added to the scores; or what `RelativeBias` gives.
            rotary: (cos, sin), fp32 [T, R / 2] or [B, T, R / 2]: the first R of the K elements of a
                head are turned by the token's place.
            past: of self-attention: x follows the tokens in there, is added to them, and sees them
                all; mask and bias are of all. Of cross-attention: `MemoryRows`, in place of memory.

        Returns:
            y as x; with config.skip_bias (y without the output's bias, that bias or None).

        Raises:
            ValueError: a shape that does not fit the layer, arguments of cross-attention for
                self-attention, or the other way round, or documents where they have no meaning.
            RuntimeError: dropout in training without `set_dropout` before.
        """
        B, T = self._shape(x, shape, "shape")
        documents = None
        if mask is not None and mask.dtype == torch.int32:
            documents, mask = mask, None
        if documents is not None and (self.cross or past is not None):
            raise ValueError(
                "documents are of self-attention over whole rows; leave them out with "
                f"{'cross=True' if self.cross else 'past='}"
            )
        seen = Seen(self.causal, mask, documents)
        if isinstance(past, MemoryRows):
            q = self._tokens(self.q(x), (B, T)).unflatten(-1, (-1, self.head_dim))
            k, v, seen = past.remembered(seen)
        else:
            q, k, v = self._project(x, (B, T), memory, memory_shape)
            if rotary is not None:
                q, k = (turn(each, *rotary, interleaved=self.interleaved) for each in (q, k))
            seen = seen._replace(layout=self._layout(self.core.lengths(T, T)[0], q, past))
            if past is not None:
                by_distance = isinstance(bias, DistanceBias)
                k, v, seen = past.attended(k, v, seen, by_distance=by_distance)
        dtype = q.dtype
        y = self.core(
            q if past is None else q.to(k.dtype),
            k,
            v,
            scale=self.scale,
            seen=seen,
            bias=bias,
            dropout=self._dropout(*self.core.lengths(T, k.shape[1])),
        )
        if past is not None:
            y = y.to(dtype)
        if self.plan.sequence_parallel:
            y = y.flatten(0, 1)
        result: Tensor | tuple[Tensor, Tensor | None] = self.output(y)
        return result

    def memory_keys(self, memory: Tensor, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
        """Of cross-attention: keys and values [B, S, own groups, K] of a memory, for `MemoryRows`.

        Args:
            memory: As of forward.
            shape: (B, S), needed under sequence parallelism.
        """
        kv = self._tokens(self.kv(memory), self._shape(memory, shape, "memory_shape"))
        k, v = kv.unflatten(-1, (-1, 2, self.head_dim)).unbind(3)
        return k, v

    def _layout(self, T: int, q: Tensor, past: KVCache | RowCache | None) -> BlockLayout | None:
        if self.layouts is None:
            return None
        layout: BlockLayout
        if past is not None and len(past):
            layout = self.layouts.last_query(len(past) + T, q.device)
        else:
            layout = self.layouts.of(T, q.device)
        return layout

    def _shape(self, x: Tensor, shape: Shape | None, what: str) -> Shape:
        if not self.plan.sequence_parallel:
            if x.dim() != 3:
                raise ValueError(f"x is {tuple(x.shape)}; attention takes [B, T, dim]")
            return x.shape[0], x.shape[1]
        if shape is None or len(x) != self.ranks.rows_per_rank(shape[0] * shape[1]):
            raise ValueError(
                f"under sequence parallelism attention needs {what}=(B, T) with ceil(B T "
                f"/ {self.ranks.size}) = {len(x)}, "
                f"the rows of x; got {shape}"
            )
        return shape

    def _project(
        self, x: Tensor, shape: Shape, memory: Tensor | None, memory_shape: Shape | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, own heads, K], k and v [B, S, own groups, K]."""
        if not self.cross:
            if memory is not None:
                raise ValueError("memory is for cross-attention; make the layer with cross=True")
            if self.merged:
                q, k, v = self._heads(self.qkv(x), shape, 3).unbind(3)
                return q, k, v
            # One gather of x, and one sum of its gradient, for both.
            q, kv = column_outputs(x, [self.q, self.kv])
            memory_shape = shape
        else:
            if memory is None:
                raise ValueError("cross-attention needs memory=, the encoder's output")
            memory_shape = self._shape(memory, memory_shape, "memory_shape")
            q, kv = self.q(x), self.kv(memory)
        k, v = self._heads(kv, memory_shape, 2).unbind(3)
        return self._heads(q, shape, 1).squeeze(3), k, v

    def _heads(self, y: Tensor, shape: Shape, parts: int) -> Tensor:
        """[B, T, own heads, parts, head_dim] of what a column-parallel layer gave."""
        return self._tokens(y, shape).view(*shape, -1, parts, self.head_dim)

    def _tokens(self, y: Tensor, shape: Shape) -> Tensor:
        """[B, T, ...] of what a column-parallel layer gave."""
        return y[: shape[0] * shape[1]].view(*shape, -1) if self.plan.sequence_parallel else y

    def _dropout(self, T: int, S: int) -> ScoreDropout | None:
        """The dropout of this rank's scores, whose counters are those of [rows of the global batch,
        H, T, S]."""
        if not self.training or self.dropout == 0.0:
            return None
        if self.state is None:
            raise RuntimeError(
                "this attention has no dropout state: call set_dropout(model, ...) "
                "before each forward, or eval()"
            )
        key, first_row = self.state.unbind()
        first = (first_row * self.num_heads + self.first_head) * (T * S)
        return ScoreDropout(self.dropout, torch.stack([key, first]), self.num_heads * T * S)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, groups={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}"
        )


def _check(dim: int, H: int, G: int, head_dim: int | None, ranks: int) -> None:
    if H > 0 and G > 0 and H % G == 0 and head_dim is None and dim % H:
        raise ValueError(
            f"dim is {dim}, which num_heads = {H} does not divide; change one of them or "
            "give head_dim"
        )
    check_heads(H, G, ranks)
