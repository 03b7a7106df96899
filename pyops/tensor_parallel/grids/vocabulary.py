"""Both ends of a language model on a grid: the embedding, and the head with its loss.

    2d, 2.5d   table over row and column: a rank gathers the rows of its columns and looks up the
               tokens of its own sequences
    3d         table over (input; output and weight): a rank gathers its columns, looks up those of
               its words for the sequences along "input", and the sums go to the sequences' ranks

    loss       a row's logits lie along a line: each rank's maximum, sum of exponentials and logit
               of the target are gathered and merged, three numbers for a token and rank

The head takes the embedding's table as its weight where they are tied: in 3d as it lies, in 2d of
q x q by an exchange of blocks across the diagonal, which the product then reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pyops.tensor_parallel.functional.initialize import initialize_
from pyops.tensor_parallel.grids.grid import Grid
from pyops.tensor_parallel.grids.linear import GridLinear, GridLinearConfig
from pyops.tensor_parallel.grids.regions import (
    exchanged,
    gathered,
    scattered_sum,
    shared,
    summed,
    whole,
)
from pyops.tensor_parallel.layers.layer_config import EmbeddingConfig

__all__ = ["GridEmbedding", "GridHead", "GridRows"]

IGNORED = -100  # a target that does not count


class GridEmbedding(nn.Module):
    """tokens [B, T] of all sequences, the same on every rank -> [b, T, dim / columns].

    Args:
        num_embeddings: number of words of the vocabulary.
        dim: width of a word's row.
        config: see `EmbeddingConfig`; None: its defaults. There is no padding_idx.
        grid: the ranks that share the table.
        device: of the table.
        dtype: of the table.

    Raises:
        ValueError: a size below 1, or a padding_idx.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        config: EmbeddingConfig | None = None,
        *,
        grid: Grid,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = config or EmbeddingConfig()
        for what, size in (("num_embeddings", num_embeddings), ("dim", dim)):
            if size < 1:
                raise ValueError(f"{what} is {size}; it must be 1 or more")
        if config.padding_idx is not None:
            raise ValueError(
                f"padding_idx is {config.padding_idx}; an embedding on a grid has none: leave it "
                "out"
            )
        self.num_embeddings, self.dim, self.grid, self.config = num_embeddings, dim, grid, config
        self.cuts = self.behind = grid.cuts
        form = "abt" if grid.flat else "ab"
        place = grid.weight_place(num_embeddings, dim, grid.cuts, form=form)
        self.placements = {"weight": place}
        self.weight = nn.Parameter(torch.empty(place.local_shape, device=device, dtype=dtype))
        if config.seed is not None:
            self.reset_parameters(seed=config.seed, name=config.name)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws the table anew from the stream (seed, name + ".weight")."""
        stream, place = f"{name}.weight" if name else "weight", self.placements["weight"]
        initialize_(self.weight, seed=seed, name=stream, std=self.config.std, placement=place)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The rows of the tokens of own sequences, own columns of them.

        Raises:
            ValueError: a token outside the vocabulary, or a dtype of the table that other ranks do
                not have; on every rank.
        """
        if self.config.check_tokens and not tokens_BT.is_cuda and tokens_BT.numel():
            low, high = torch.stack(tokens_BT.aminmax()).tolist()
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"token {low if low < 0 else high} is outside the vocabulary of "
                    f"{self.num_embeddings}: 0 to {self.num_embeddings - 1}"
                )
        grid = self.grid
        grid.check_dtype(self.weight)
        if grid.flat:
            weight = self.weight
            if "depth" in grid.axes:
                weight = shared(weight, grid.line("depth"))  # type: ignore[assignment]
            table = gathered(weight, grid.line("row"), dim=0)
            return nn.functional.embedding(grid.take_rows(tokens_BT), table)
        table = gathered(self.weight, grid.line("weight"), dim=1)
        tokens = self._line_of_sequences(tokens_BT)
        first = self.placements["weight"].cuts[0].start
        here = (tokens >= first) & (tokens < first + len(table))
        found = nn.functional.embedding((tokens - first).masked_fill(~here, 0), table)
        found = found.masked_fill(~here.unsqueeze(-1), 0.0)
        return scattered_sum(found, grid.line("input"), dim=0)

    def _line_of_sequences(self, tokens_BT: Tensor) -> Tensor:
        """The tokens of the sequences of all ranks along "input"; padding is word 0."""
        grid = self.grid
        each = grid.rows(len(tokens_BT))[2] * grid.axes["input"]
        start = grid.position["weight"] * each
        found = tokens_BT[start : start + each]
        return nn.functional.pad(found, (0, 0, 0, each - len(found)))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.dim}, {self.grid}"


class GridRows(nn.Module):
    """Rows that are added to tokens, such as learned positions: index int64 [b, T] of own
    sequences -> [b, T, dim / columns]. Ranks with other sequences have copies.

    Args:
        length: number of rows.
        dim: their width.
        grid: the ranks that share the columns.
        device: of the rows.
        dtype: of the rows.
    """

    def __init__(
        self,
        length: int,
        dim: int,
        *,
        grid: Grid,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.cuts = self.behind = grid.cuts
        place = grid.width_place(dim, grid.cuts, stacked=length)
        self.placements = {"weight": place}
        self.weight = nn.Parameter(torch.zeros(place.local_shape, device=device, dtype=dtype))

    def forward(self, index: Tensor) -> Tensor:
        """The rows, own columns of them."""
        line = self.grid.line(*self.cuts.rows)
        return nn.functional.embedding(index, shared(self.weight, line))


class GridHead(GridLinear):
    """x [b, T, dim / columns] -> logits [B, T, V] of all sequences on every rank, or the loss.

    Args:
        vocab_size: V, the number of words.
        dim: the width of x.
        grid: the ranks that share the vocabulary.
        tied: an embedding whose table is the weight, see `tie`; None: an own one.
        config: see `GridLinearConfig`; None: its defaults.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        grid: Grid,
        tied: GridEmbedding | None = None,
        config: GridLinearConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim, vocab_size, grid=grid, bias=False, config=config, device=device, dtype=dtype
        )
        self.tied = False
        if tied is not None:
            self.tie(tied)

    def tie(self, embedding: GridEmbedding) -> None:
        """Take the embedding's table as the weight: one parameter for both. On a grid of other
        sides than q x q the product is then A B^T."""
        grid = self.grid
        if grid.flat and grid.axes["row"] != grid.axes["column"]:
            self.config = replace(self.config, form="abt")
        self.tied, self.weight = True, embedding.weight
        self.placements = dict(embedding.placements)

    def own_logits(self, x: Tensor) -> Tensor:
        """[b, T, V / ranks along the columns], of own sequences behind the product, padded."""
        weight: Tensor = self.weight
        if self.tied and self.grid.flat and self.config.form == "ab":
            # Block (i, j) of the table [V, D] becomes block (i, j) of a weight [D, V].
            weight = exchanged(weight, self.grid.line("row", "column"), self.grid.opposite())
        return self.multiply(x, weight)

    def forward(
        self, x: Tensor, shape: tuple[int, int] | None = None, *, gather: bool = True
    ) -> Tensor:
        """Logits [B, T, V], the same on every rank.

        Args:
            x: [b, T, dim / columns].
            shape: (B, T) of all sequences; None: B is that with the last ranks' padding.
            gather: False: `own_logits`.
        """
        logits = self.own_logits(x)
        if not gather:
            return logits
        rows = len(x) * self.grid.count(self.behind.rows) if shape is None else shape[0]
        return whole(logits, self.grid, batch=rows, width=self.out_features, cuts=self.behind)

    def loss(
        self,
        x: Tensor,
        targets_BT: Tensor,
        *,
        shape: tuple[int, int] | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross entropy in nats, the same scalar on every rank.

        Args:
            x: [b, T, dim / columns].
            targets_BT: int64 [B, T] of all sequences, the same on every rank; those of -100 do not
                count, on whichever rank they are.
            shape: (B, T); the targets say it.
            reduction: "mean" over all that count, or "sum".

        Raises:
            ValueError: another reduction.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; choose 'mean' or 'sum'")
        targets = self.grid.take_rows(targets_BT, self.behind, fill=IGNORED)
        losses: Tensor = _CrossEntropy.apply(self.own_logits(x), targets, self)  # type: ignore[no-untyped-call]
        total = summed(losses.sum(), self.grid.line(*self.behind.rows))
        return total if reduction == "sum" else total / (targets_BT != IGNORED).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, head: GridHead) -> Tensor:
        cut = head.grid.columns(head.out_features, head.behind)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        lowest = torch.finfo(wide.dtype).min
        if cut.stop - cut.start < cut.length:
            wide = wide.clone()
            wide[..., cut.stop - cut.start :] = lowest
        here = (targets >= cut.start) & (targets < cut.stop)
        index = (targets - cut.start).masked_fill(~here, 0).unsqueeze(-1)
        own = torch.stack(
            [
                wide.amax(-1),
                (wide - wide.amax(-1, keepdim=True)).exp().sum(-1),
                wide.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0),
            ]
        )
        rows, pending = head.grid.line(head.behind.columns).start_gather(own)
        pending.wait()
        highest = rows[:, 0].amax(0)
        total = (rows[:, 1] * (rows[:, 0] - highest).exp()).sum(0)
        logarithm = highest + total.log()
        counts = targets != IGNORED
        ctx.save_for_backward(logits, logarithm, index, here, counts)
        ctx.valid = cut.stop - cut.start
        return (logarithm - rows[:, 2].sum(0)).masked_fill(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        logits, logarithm, index, here, counts = ctx.saved_tensors
        wide = logits if logits.dtype == torch.float64 else logits.float()
        found = (wide - logarithm.unsqueeze(-1)).exp()
        found.scatter_add_(-1, index, -here.unsqueeze(-1).to(found.dtype))
        found *= dy.masked_fill(~counts, 0.0).unsqueeze(-1)
        found[..., ctx.valid :] = 0.0
        return found.to(logits.dtype), None, None
