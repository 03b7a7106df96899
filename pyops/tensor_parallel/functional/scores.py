"""The part of attention between its projections: rotary positions, scores, softmax, values; and
T5's bias by distance."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.ops.layers.dropout import dropout
from pyops.tensor_parallel.functional.initialise import initialise_
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["Core", "RelativeBias", "attend", "rotary_tables"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    state: Tensor | None = None,
    row_stride: int = 0,
) -> Tensor:
    """q [B, T, H, K], k and v [B, S, G, K], where H is a multiple of G -> [B, T, H K].

    mask and bias as in ParallelAttention. p, state, row_stride: dropout of the probabilities, whose
    scores are then made explicitly: the mask's counters of a sequence begin row_stride after those
    of the one before.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    added = _added(q, k, causal and (mask is not None or bias is not None or p > 0.0), mask, bias)
    groups = q.shape[1] // k.shape[1]
    if p == 0.0:
        y = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=added,
            is_causal=causal and added is None,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return y.transpose(1, 2).flatten(2)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if added is not None:
        scores = (
            scores.masked_fill(~added, -math.inf) if added.dtype == torch.bool else scores + added
        )
    weights = scores.softmax(dim=-1).to(
        q.dtype
    )  # computed in fp32 at least, and kept for backward in 16 bits
    weights = dropout(weights, p=p, state=state, row=weights[0].numel(), row_stride=row_stride)
    return (weights @ v).transpose(1, 2).flatten(2)


class Core(nn.Module):
    """`attend` as a module without parameters, so that it can be named: to be recomputed in
    backward, say."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attend(q, k, v, **options)


def _added(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """A bool mask, or what is added to the scores."""
    seen = None
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() not in (2, 3):
            raise ValueError(
                "mask must be bool, [B, S] or [B, T, S], True where a key may be seen; "
                f"got {mask.dtype} {mask.shape}"
            )
        seen = mask[:, None, None] if mask.dim() == 2 else mask[:, None]
    if causal:
        before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        seen = before if seen is None else seen & before
    if bias is None:
        return seen
    bias = bias.to(q.dtype)
    return bias if seen is None else bias.masked_fill(~seen, -math.inf)


def rotary_tables(
    length: int, width: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 [length, width / 2], of position * base^(-2 i / width), computed in fp64."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float().to(device), angle.sin().float().to(device)


class RelativeBias(nn.Module):
    """A learned number for each head and bucket of distances, added to the scores (T5; Raffel et
    al., 2020, section 2.1).

    forward(T, S) -> [1, own heads, T, S]. weight: [num_buckets, heads / ranks], cut and padded as
    the heads are. bidirectional: an encoder's, half of the buckets for keys after the query.
    Distances up to a half of what is left have a bucket each, those beyond share them by logarithm
    up to max_distance.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional, self.std = (
            num_buckets,
            max_distance,
            bidirectional,
            std,
        )
        ranks = Ranks.of(group)
        place = Placement.cut((num_buckets, num_heads), dim=1, rank=ranks.rank, ranks=ranks.size)
        self.placements = {"weight": place}
        self.weight = nn.Parameter(torch.empty(place.local_shape, device=device, dtype=dtype))
        if seed is not None:
            self.reset_parameters(seed=seed, name=name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draw the numbers anew from the stream (seed, name + ".weight")."""
        stream = f"{name}.weight" if name else "weight"
        initialise_(
            self.weight, seed=seed, name=stream, std=self.std, placement=self.placements["weight"]
        )

    def forward(self, queries: int, keys: int) -> Tensor:
        device = self.weight.device
        distance = (
            torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        )
        return (
            functional.embedding(self._bucket(distance), self.weight).permute(2, 0, 1).unsqueeze(0)
        )

    def _bucket(self, distance: Tensor) -> Tensor:
        """Key's place minus query's place -> bucket."""
        buckets, found = self.num_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            found = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        far = (
            (distance.float().clamp(min=1) / exact).log()
            / math.log(self.max_distance / exact)
            * (buckets - exact)
        )
        return found + torch.where(
            distance < exact, distance, (exact + far.long()).clamp(max=buckets - 1)
        )
