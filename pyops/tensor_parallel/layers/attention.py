"""Multi-head attention cut over ranks by heads: one sum over ranks forward, one backward.

    x --> q k v of own heads (columns) --> softmax(q k^T scale + bias) v --> output (rows) --> sum, + bias

How the weights lie, for H heads of width K in G groups that share keys and values:

    self-attention, G = H      qkv.weight [H 3 K, D]      rows (head; query, key, value; K)
    self-attention, G < H      q.weight   [H K, D]        rows (head; K), and
    and cross-attention        kv.weight  [G 2 K, D]      rows (group; key, value; K), from the memory in cross-attention
    output.weight              [D, H K]                   columns (head; K)

All are cut by whole groups. Where there are fewer groups than ranks, each group's key and value are
on ranks / G ranks, which share out its heads; each has a part of the gradient of kv, as its
placement says, that `finish_gradients` sums. Where the ranks do not divide the groups, the last
ranks' are padded: a head of zeros adds nothing and learns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.ops.layers.dropout import dropout_state
from pyops.ops.layers.rotary import rotary as turned
from pyops.tensor_parallel.functional.products import column_products
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.functional.scores import Core
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyops.tensor_parallel.layers.past import Past

__all__ = ["ParallelAttention", "check_heads"]

TRIED, LISTED = (
    4096,
    32,
)  # sizes that a message looks at, and that it names, however many heads were asked for

Shape = tuple[int, int]


class ParallelAttention(nn.Module):
    """x [B, T, dim] -> [B, T, dim]; under sequence parallelism this rank's rows [n, dim] of the B T
    tokens to the same.

    num_kv_heads: G, by default num_heads. head_dim: K, by default dim / num_heads. scale: by
    default K^-1/2. bias: of q, k and v; out_bias: of the output, by default the same. cross: keys
    and values come from `memory` of width memory_dim (dim). causal: a token sees itself and those
    before it. dropout: of the attention probabilities, in training, by counters (see
    pyops.tensor_parallel.functional.dropout). interleaved: rotary turns neighbours (0, 1), (2, 3),
    ... instead of halves. skip_bias: returns (y without the output's bias, bias or None). out_std:
    deviation of output.weight, by default std. The rest as in ColumnParallelLinear.

    ValueError, naming the sizes that do: heads that are not whole groups, fewer heads than ranks,
    groups that can't be shared.
    """

    state: Tensor | None
    qkv: ColumnParallelLinear
    q: ColumnParallelLinear
    kv: ColumnParallelLinear

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        cross: bool = False,
        memory_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        interleaved: bool = False,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        skip_bias: bool = False,
        reduce: str = "fp32",
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
        std: float = 0.02,
        out_std: float | None = None,
    ) -> None:
        super().__init__()
        G = num_heads if num_kv_heads is None else num_kv_heads
        ranks = Ranks.of(group)
        _check(dim, num_heads, G, head_dim, ranks.size)
        if causal and cross:
            raise ValueError(
                "causal=True has no meaning for cross-attention, whose memory has no "
                "order with x; pass a mask"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(
                f"dropout is {dropout}; it is a probability, 0 or more and less than 1"
            )
        K = dim // num_heads if head_dim is None else head_dim
        self.num_heads, self.num_kv_heads, self.head_dim, self.per_group = (
            num_heads,
            G,
            K,
            num_heads // G,
        )
        self.scale, self.causal, self.cross = K**-0.5 if scale is None else scale, causal, cross
        self.dropout, self.interleaved, self.ranks = dropout, interleaved, ranks
        self.copies = max(1, ranks.size // G)
        shared: dict[str, Any] = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "reduce": reduce,
            "overlap": overlap,
            "device": device,
            "dtype": dtype,
            "seed": seed,
        }
        at = name + "." if name else ""
        unit = K if self.copies > 1 else self.per_group * K
        self.merged = not cross and self.per_group == 1
        if self.merged:
            self.qkv = ColumnParallelLinear(
                dim, G * 3 * K, unit=3 * K, bias=bias, name=at + "qkv", std=std, **shared
            )
        else:
            inner = memory_dim if cross and memory_dim is not None else dim
            self.q = ColumnParallelLinear(
                dim, num_heads * K, unit=unit, bias=bias, name=at + "q", std=std, **shared
            )
            self.kv = ColumnParallelLinear(
                inner,
                G * 2 * K,
                unit=2 * K,
                copies=self.copies,
                bias=bias,
                name=at + "kv",
                std=std,
                **shared,
            )
        self.output = RowParallelLinear(
            num_heads * K,
            dim,
            unit=unit,
            skip_bias=skip_bias,
            bias=bias if out_bias is None else out_bias,
            name=at + "output",
            std=std if out_std is None else out_std,
            **shared,
        )
        self.core = Core()
        self.plan = self.output.plan
        place = self.output.placements["weight"]
        self.first_head, self.local_heads = place.start // K, place.length // K
        self.register_buffer("state", None, persistent=False)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draw all weights anew from the streams (seed, name + ".qkv.weight") and so on; biases
        become zero."""
        for key, layer in self.named_children():
            if layer is self.core:
                continue
            layer.reset_parameters(seed=seed, name=f"{name}.{key}" if name else key)  # type: ignore[operator]

    def take_state(
        self, *, key: int, first_row: int, shape: Shape, device: torch.device | None = None
    ) -> None:
        """(key, first sequence) for the next forward's dropout; see `set_dropout`."""
        self.state = dropout_state(key, first_row, device=device)

    def forward(
        self,
        x: Tensor,
        *,
        memory: Tensor | None = None,
        shape: Shape | None = None,
        memory_shape: Shape | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past: Past | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """shape, memory_shape: (B, T) and (B, S) of the tokens, needed under sequence parallelism,
        where x and memory are rows.

        mask: bool, True where a key may be seen: [B, S], or [B, T, S]. bias: added to the scores,
        [1 or B, own heads, T, S]. rotary: (cos, sin), fp32 [T, R / 2] or [B, T, R / 2]: the first R
        of K are turned by the token's place.
        past: of self-attention: x follows the tokens in there, is added to them, and sees them all;
        mask and bias are of all.
        """
        B, T = self._shape(x, shape, "shape")
        q, k, v = self._project(x, (B, T), memory, memory_shape)
        if rotary is not None:
            q, k = (turned(each, *rotary, interleaved=self.interleaved) for each in (q, k))
        causal = self.causal
        if past is not None:
            causal = causal and len(past) == 0  # a single token that follows sees all
            k, v = past.extend(k, v)
        p = self.dropout if self.training else 0.0
        y = self.core(
            q,
            k,
            v,
            scale=self.scale,
            causal=causal,
            mask=mask,
            bias=bias,
            p=p,
            state=self._score_state(T, k.shape[1]) if p > 0.0 else None,
            row_stride=self.num_heads * T * k.shape[1],
        )
        if self.plan.sequence_parallel:
            y = y.flatten(0, 1)
        return self.output(y)

    def _shape(self, x: Tensor, shape: Shape | None, what: str) -> Shape:
        if not self.plan.sequence_parallel:
            if x.dim() != 3:
                raise ValueError(f"x is {tuple(x.shape)}; attention takes [B, T, dim]")
            return x.shape[0], x.shape[1]
        if shape is None or len(x) != self.ranks.rows_each(shape[0] * shape[1]):
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
        K = self.head_dim
        if not self.cross:
            if memory is not None:
                raise ValueError("memory is for cross-attention; make the layer with cross=True")
            if self.merged:
                return self._tokens(self.qkv(x), shape).unflatten(-1, (-1, 3, K)).unbind(3)  # type: ignore[return-value]
            q, kv = column_products(
                x, [self.q.weight, self.kv.weight], [self.q.bias, self.kv.bias], self.plan
            )  # one gather of x and one sum of its gradient for both
            memory_shape = shape
        else:
            if memory is None:
                raise ValueError("cross-attention needs memory=, the encoder's output")
            memory_shape = self._shape(memory, memory_shape, "memory_shape")
            q, kv = self.q(x), self.kv(memory)
        k, v = self._tokens(kv, memory_shape).unflatten(-1, (-1, 2, K)).unbind(3)
        return self._tokens(q, shape).unflatten(-1, (-1, K)), k, v

    def _tokens(self, y: Tensor, shape: Shape) -> Tensor:
        """[B, T, ...] of what a column-parallel layer gave."""
        return y[: shape[0] * shape[1]].view(*shape, -1) if self.plan.sequence_parallel else y

    def _score_state(self, T: int, S: int) -> Tensor:
        """(key, index of the first element of this rank's scores in those of the global batch,
        [rows, H, T, S])."""
        if self.state is None:
            raise RuntimeError(
                "this attention has no dropout state: call set_dropout(model, ...) "
                "before each forward, or eval()"
            )
        key, first_row = self.state.unbind()
        return torch.stack([key, (first_row * self.num_heads + self.first_head) * (T * S)])

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


def _sizes(fitting: Iterator[int], H: int) -> str:
    """The first of the sizes that fit, for a message."""
    first = list(islice(fitting, LISTED + 1))
    more = " and others" if len(first) > LISTED or H > TRIED else ""
    return ", ".join(map(str, first[:LISTED])) + more


def check_heads(H: int, G: int, ranks: int) -> None:
    """ValueError for H heads in G groups that can't be split over the ranks, with the sizes that
    can."""
    small = range(1, min(H, TRIED) + 1)
    if H < 1 or G < 1 or H % G:
        divisors = _sizes((n for n in small if H % n == 0), H)
        raise ValueError(
            f"num_kv_heads is {G}, which does not divide num_heads = {H}; choose one of {divisors}"
        )

    def fit(t: int) -> bool:
        return t <= H and (t <= G or (t % G == 0 and (H // G) % (t // G) == 0))

    if not fit(ranks):
        raise ValueError(
            f"{H} heads in {G} groups can't be split over {ranks} ranks; "
            f"{_sizes(filter(fit, small), H)} ranks can. Up to {G} "
            "ranks take whole groups; beyond, a group's query heads must be shared out "
            "evenly by the ranks that hold it"
        )
