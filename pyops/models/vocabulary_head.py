"""The last layer of a language model: logits over a vocabulary that the ranks share, or the loss
without whole logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.context_parallel import token_mean
from pyops.flat import Placement
from pyops.models.model_layout import ModelLayout, Shape
from pyops.ops import few_rows
from pyops.tensor_parallel import (
    ColumnConfig,
    ColumnParallelLinear,
    LinearCrossEntropyConfig,
    linear_cross_entropy,
)
from pyops.tensor_parallel.functional.regions import copy, gather

__all__ = ["IGNORED", "VocabularyHead"]

IGNORED = -100  # a target that does not count


class VocabularyHead(ColumnParallelLinear):
    """x, as a rank holds tokens -> logits [B, T, V] on every rank; gather=False: this rank's
    columns [B, T, ceil(V / ranks)].

    weight: [ceil(V / ranks), D]; `tie` makes it an embedding's. shape: (B, T), needed under
    sequence parallelism. The last ranks' columns beyond V are padding, and zero.
    """

    def __init__(
        self, vocab_size: int, dim: int, *, bias: bool = False, layout: ModelLayout
    ) -> None:
        super().__init__(
            dim, vocab_size, bias=bias, config=ColumnConfig(seed=None), **layout.parallel
        )
        self.layout = layout

    def tie(self, embedding: nn.Module) -> None:
        """Take the embedding's table as the weight: one parameter for both."""
        self.weight = embedding.weight  # type: ignore[assignment]

    def forward(self, x: Tensor, shape: Shape | None = None, *, gather: bool = True) -> Tensor:
        shape, adapter = self.layout.own_shape(shape), self.adapter
        if adapter is None or not adapter.enabled:
            return self._logits(self._all_tokens(x, shape), whole=gather)
        h = self._all_tokens(adapter.down(x), shape)
        return self._logits(self._all_tokens(x, shape), whole=gather, hidden=h)

    def low_rank_places(self, rank: int) -> dict[str, Placement]:
        """As of `ColumnParallelLinear`. Its A is applied to tokens as a rank holds them."""
        places = super().low_rank_places(rank)
        return {**places, "A": self.layout.placement(torch.empty(places["A"].global_shape))}

    def loss(
        self, x: Tensor, targets_BT: Tensor, *, shape: Shape | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Cross entropy in nats without whole logits, the same on every rank; targets of -100 don't
        count.

        Args:
            shape: (B, T) of whole rows.
            reduction: "mean" over those that count, or "sum", which is of the own tokens where
                ranks of context parallelism share rows out. Scalar, fp32 (fp64 of an fp64 model).
        """
        shape = self.layout.own_shape(shape)
        targets_BT, context = self.layout.own_tokens(targets_BT), self.layout.context
        if context is None or reduction != "mean":
            return self._loss(x, targets_BT, shape=shape, reduction=reduction)
        total = self._loss(x, targets_BT, shape=shape, reduction="sum")
        return token_mean(total, (targets_BT != IGNORED).sum(), group=context.ranks.group)

    def _loss(
        self, x: Tensor, targets_BT: Tensor, *, shape: Shape | None, reduction: str
    ) -> Tensor:
        # Where tokens are shared out, gathering them sums their gradient over the ranks; else the
        # loss does.
        weight: Tensor = self.weight
        adapter = self.adapter
        if adapter is not None and adapter.enabled:
            x = torch.cat([x, adapter.scale * adapter.down(x)], dim=-1)
            weight = torch.cat([weight, adapter.factor("B", weight)], dim=1)
        return linear_cross_entropy(
            self.layout.whole(x, shape),
            weight,
            targets_BT,
            bias=self.bias,
            group=self.layout.ranks,
            reduction=reduction,
            config=LinearCrossEntropyConfig(
                vocab_size=self.out_features,
                ignore_index=IGNORED,
                reduce_hidden=not self.layout.shared,
            ),
        )

    def _all_tokens(self, x: Tensor, shape: Shape | None) -> Tensor:
        return (
            self.layout.whole(x, shape) if self.layout.shared else copy(x, group=self.layout.ranks)
        )

    def _logits(self, x_BTD: Tensor, *, whole: bool, hidden: Tensor | None = None) -> Tensor:
        logits = few_rows.linear(x_BTD, self.weight, self.bias)
        if hidden is not None and self.adapter is not None:
            logits = self.adapter.add(logits, hidden)
        if not whole or self.layout.ranks.size == 1:
            return logits
        return gather(logits, dim=-1, duplicated=True, group=self.layout.ranks)[
            ..., : self.out_features
        ]
