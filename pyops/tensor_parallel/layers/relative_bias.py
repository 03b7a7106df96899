"""T5's bias by distance (Raffel et al., 2020, section 2.1): attention sees how far a key is from
the query, not where it is."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.tensor_parallel.functional.initialize import initialize_
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.layers.layer_config import RelativeBiasConfig

__all__ = ["RelativeBias"]


class RelativeBias(nn.Module):
    """A learned number for each head and bucket of distances, which is added to the scores.

    weight: [num_buckets, heads / ranks], cut and padded as the heads are. The first half of the
    buckets hold one distance each, the others share distances by logarithm up to max_distance.

    Args:
        num_heads: number of heads of the whole attention.
        config: see `RelativeBiasConfig`; None: its defaults.
        group: see `RanksLike`.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        num_heads: int,
        config: RelativeBiasConfig | None = None,
        *,
        group: RanksLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: NoReturn,
    ) -> None:
        super().__init__()
        if moved:
            refuse_keywords("RelativeBias", moved, RelativeBiasConfig)
        self.config = config = config or RelativeBiasConfig()
        ranks = Ranks.of(group)
        place = Placement.cut(
            (config.num_buckets, num_heads), dim=1, rank=ranks.rank, ranks=ranks.size
        )
        self.placements = {"weight": place}
        self.weight = nn.Parameter(torch.empty(place.local_shape, device=device, dtype=dtype))
        if config.seed is not None:
            self.reset_parameters(seed=config.seed, name=config.name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws the weight anew from the stream (seed, name + ".weight")."""
        stream = f"{name}.weight" if name else "weight"
        initialize_(
            self.weight,
            seed=seed,
            name=stream,
            std=self.config.std,
            placement=self.placements["weight"],
        )

    def forward(self, queries: int, keys: int) -> Tensor:
        """The bias [1, own heads, queries, keys] of as many queries and keys."""
        device = self.weight.device
        distance = (
            torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        )
        return (
            functional.embedding(self._bucket(distance), self.weight).permute(2, 0, 1).unsqueeze(0)
        )

    def _bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, the key's place minus the query's."""
        buckets, found = self.config.num_buckets, torch.zeros_like(distance)
        if self.config.bidirectional:
            buckets //= 2
            found = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        far = (
            (distance.float().clamp(min=1) / exact).log()
            / math.log(self.config.max_distance / exact)
            * (buckets - exact)
        )
        return found + torch.where(
            distance < exact, distance, (exact + far.long()).clamp(max=buckets - 1)
        )
