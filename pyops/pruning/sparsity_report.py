"""report: how sparse each parameter is, and what it would weigh in which form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.pruning.masks import masks_of

__all__ = ["PrunedLayer", "PruningReport", "report"]


@dataclass(frozen=True)
class PrunedLayer:
    """One masked parameter of this rank."""

    name: str
    """Of the parameter."""
    shape: tuple[int, ...]
    """Of this rank's tensor."""
    kept: int
    """Weights that are alive."""
    kept_magnitude: float | None
    """The sum of the magnitudes that stayed, relative to that of the dense weights; None where
    those were not given."""
    item_bytes: int
    """Of one weight."""

    @property
    def numel(self) -> int:
        """Weights, dead ones too."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def sparsity(self) -> float:
        """The share that is gone."""
        return 1.0 - self.kept / max(self.numel, 1)

    @property
    def dense_bytes(self) -> int:
        """All weights."""
        return self.numel * self.item_bytes

    @property
    def packed_bytes(self) -> int:
        """A bit for each weight, and those that are alive."""
        return -(-self.numel // 8) + self.kept * self.item_bytes

    @property
    def csr_bytes(self) -> int:
        """Rows of (column, value) with numbers of 4 bytes."""
        return self.kept * (self.item_bytes + 4) + 4 * (self.shape[0] + 1)


@dataclass(frozen=True)
class PruningReport:
    """What `report` found; str() of it is a table."""

    layers: tuple[PrunedLayer, ...]
    """The masked parameters."""
    other_numel: int
    """Weights of the model that have no mask."""

    @property
    def sparsity(self) -> float:
        """Of the masked parameters together."""
        numel = sum(each.numel for each in self.layers)
        return 1.0 - sum(each.kept for each in self.layers) / max(numel, 1)

    def __str__(self) -> str:
        width = max([len(each.name) for each in self.layers] + [len("all masked")])
        head = f"{'parameter':{width}}  {'sparsity':>8}  {'magnitude':>9}  "
        lines = [head + f"{'dense':>12}  {'packed':>12}  {'csr':>12}"]
        for each in self.layers:
            stays = "" if each.kept_magnitude is None else f"{each.kept_magnitude:.4f}"
            lines.append(
                f"{each.name:{width}}  {each.sparsity:>8.4f}  {stays:>9}  "
                f"{each.dense_bytes:>12,}  {each.packed_bytes:>12,}  {each.csr_bytes:>12,}"
            )
        sums = [
            sum(getattr(each, key) for each in self.layers)
            for key in ("dense_bytes", "packed_bytes", "csr_bytes")
        ]
        lines.append(
            f"{'all masked':{width}}  {self.sparsity:>8.4f}  {'':>9}  "
            + "  ".join(f"{total:>12,}" for total in sums)
        )
        return "\n".join([*lines, f"{self.other_numel:,} weights have no mask"])


def report(model: nn.Module, *, dense: Mapping[str, Tensor] | None = None) -> PruningReport:
    """How sparse this rank's part of a model is, and its bytes in each form.

    Args:
        model: One that masks were made for.
        dense: {name: weights before pruning}, such as a state_dict, for the magnitude that stayed.
    """
    masks, layers, other = masks_of(model), [], 0
    for name, parameter in model.named_parameters():
        mask = masks.get(name)
        if mask is None:
            other += parameter.numel()
            continue
        stayed = None
        if dense is not None and name in dense:
            weights = dense[name].detach().abs().double()
            kept = weights * mask.alive().to(weights.device)
            stayed = float(kept.sum() / weights.sum()) if torch.any(weights) else 1.0
        layers.append(PrunedLayer(name, mask.shape, mask.kept, stayed, parameter.element_size()))
    return PruningReport(tuple(layers), other)
