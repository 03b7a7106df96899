"""An embedding table cut over ranks along the vocabulary: a rank looks up the tokens that it holds,
and a sum completes them.

    tokens  5 0 3        rank 0 (rows 0 1 2)   .   e0  .
                         rank 1 (rows 3 4 5)   e5  .   e3        sum -> e5 e0 e3

(Shoeybi et al., 2019, section 3.) Each row of the result comes from one rank, so the sum is exact
in any dtype.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.tensor_parallel.functional.initialize import initialize_
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.functional.regions import reduce, reduce_scatter_tokens
from pyops.tensor_parallel.layers.layer_config import EmbeddingConfig
from pyops.torch_private import assert_async

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    """tokens [...] of integers, the same on every rank -> [..., dim]; under sequence parallelism
    this rank's rows [n, dim] of the flattened tokens.

    weight: [ceil(num_embeddings / ranks), dim], padded with zeros where the ranks do not divide the
    vocabulary.

    Args:
        num_embeddings: number of words of the vocabulary.
        dim: width of a word's row.
        config: see `EmbeddingConfig`; None: its defaults.
        group: the ranks that share the table, see `RanksLike`; None: the default process group.
        sequence_parallel: whether tokens are cut over the ranks behind the layer.
        device: of the table.
        dtype: of the table.

    Raises:
        ValueError: a size below 1.
        TypeError: `group` is no group that this rank is in.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        config: EmbeddingConfig | None = None,
        *,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: NoReturn,
    ) -> None:
        super().__init__()
        if moved:
            refuse_keywords("VocabParallelEmbedding", moved, EmbeddingConfig)
        config = config or EmbeddingConfig()
        for what, size in (("num_embeddings", num_embeddings), ("dim", dim)):
            if size < 1:
                raise ValueError(f"{what} is {size}; it must be 1 or more")
        self.num_embeddings, self.dim = num_embeddings, dim
        self.std, self.check_tokens = config.std, config.check_tokens
        self.ranks = Ranks.of(group)
        self.sequence_parallel = sequence_parallel and self.ranks.size > 1
        place = Placement.cut(
            (num_embeddings, dim), dim=0, rank=self.ranks.rank, ranks=self.ranks.size
        )
        self.placements = {"weight": place}
        self.padding_idx = padding = config.padding_idx
        here = padding is not None and place.start <= padding < place.stop
        self._local_padding = padding - place.start if padding is not None and here else None
        self.weight = nn.Parameter(torch.empty(place.local_shape, device=device, dtype=dtype))
        if config.seed is not None:
            self.reset_parameters(seed=config.seed, name=config.name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws the table anew from the stream (seed, name + ".weight")."""
        stream = f"{name}.weight" if name else "weight"
        initialize_(
            self.weight, seed=seed, name=stream, std=self.std, placement=self.placements["weight"]
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens.

        Raises:
            ValueError: a token outside the vocabulary, see `EmbeddingConfig.check_tokens`.
        """
        if self.check_tokens and not torch.compiler.is_compiling():
            self._check(tokens)
        if self.ranks.size == 1:
            return functional.embedding(tokens, self.weight, self._local_padding)
        place = self.placements["weight"]
        here = (tokens >= place.start) & (tokens < place.stop)
        found = functional.embedding(
            (tokens - place.start).masked_fill(~here, 0), self.weight, self._local_padding
        )
        found = found.masked_fill(~here.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_tokens(found.view(-1, self.dim), group=self.ranks)
        return reduce(found, group=self.ranks)

    def _check(self, tokens: Tensor) -> None:
        if tokens.numel() == 0:
            return
        if tokens.is_cuda:
            if self.ranks.size > 1:  # else the look-up itself asserts
                inside = ((tokens >= 0) & (tokens < self.num_embeddings)).all()
                assert_async(inside, f"a token is outside the vocabulary of {self.num_embeddings}")
            return
        low, high = torch.stack(tokens.aminmax()).tolist()
        if low < 0 or high >= self.num_embeddings:
            wrong = low if low < 0 else high
            where = (tokens == wrong).nonzero()[0].tolist()
            raise ValueError(
                f"token {wrong} at {where} is outside the vocabulary of "
                f"{self.num_embeddings}: 0 to {self.num_embeddings - 1}"
            )

    def extra_repr(self) -> str:
        shared = f", rank {self.ranks.rank} of {self.ranks.size}" if self.ranks.size > 1 else ""
        return f"{self.num_embeddings}, {self.dim}{shared}"
