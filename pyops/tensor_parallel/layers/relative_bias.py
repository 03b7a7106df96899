"""T5's bias by distance (Raffel et al., 2020, section 2.1): attention sees how far a key is from
the query, not where it is."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.ops.attention.distance import relative_buckets
from pyops.tensor_parallel.functional.initialize import initialize_
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.functional.scores import DistanceBias
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

    def forward(self, *sizes: int) -> DistanceBias:
        """What `ParallelAttention` takes as bias, for any number of queries and keys.

        Raises:
            TypeError: for sizes, of which earlier versions made a tensor.
        """
        if sizes:
            raise TypeError(
                f"RelativeBias is called with {sizes}; call it without arguments, for what "
                "ParallelAttention takes as bias, or `scores(queries, keys)` for the tensor"
            )
        config = self.config
        # A copy of the few numbers: a strategy may let go of the parameter after this call.
        return DistanceBias(self.weight.clone(), config.max_distance, config.bidirectional)

    def scores(self, queries: int, keys: int) -> Tensor:
        """The bias [1, own heads, queries, keys] of as many queries and keys."""
        most = self.config.max_distance
        buckets = relative_buckets(
            self.config.num_buckets,
            max_distance=most,
            bidirectional=self.config.bidirectional,
            device=self.weight.device,
        )
        places = torch.arange(keys, device=self.weight.device)
        distance = places - torch.arange(queries, device=self.weight.device)[:, None]
        rows = buckets[distance.clamp(-most, most) + most]
        return functional.embedding(rows, self.weight).permute(2, 0, 1).unsqueeze(0)
