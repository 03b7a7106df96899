"""PortionGradients: what a worker computes: the losses and gradients of runs of portions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyops.comm.model_parts import check_model, cut, named_parameters
from pyops.flat import FlatBuffer
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.sums import PortionSums

__all__ = ["PortionGradients", "PortionLoss"]

PortionLoss = Callable[[nn.Module, int], Tensor]
SAME_POINT = 1e-4  # relative: by which two evaluations at one point may differ


class PortionGradients:
    """A worker's model and what it makes of portions.

    Args:
        model: Its parameters become views of one flat vector.
        loss: (model, portion) -> the portion's share of the batch's loss, a scalar: the loss is the
            sum over all portions.
        config: How portions are handed out.
        shards: How many parts the vector is cut into.

    Attributes:
        starts: Where each part begins, and the end.
        computed: Runs that were computed.

    Raises:
        ValueError: For a model that shards can't hold.
    """

    def __init__(
        self, model: nn.Module, loss: PortionLoss, config: SandblasterConfig, *, shards: int
    ) -> None:
        check_model(model, buffers="refuse", codecs=False)
        self.model, self.config, self._loss = model, config, loss
        self.starts = cut(model, shards=shards)
        self.buffer = FlatBuffer(named_parameters(model))
        self.computed = 0

    def parts(self, vector: Tensor) -> list[Tensor]:
        """A vector's parts, views."""
        return [vector[a:b] for a, b in pairwise(self.starts)]

    def run(self, index: int) -> tuple[float, Tensor]:
        """(loss, gradient [numel]) of a run of portions, summed along their tree.

        Raises:
            ValueError: The first time, where the loss differs between two calls.
        """
        portions, size = self.config.portions, self.config.run
        losses: PortionSums[float] = PortionSums(portions, height=self.config.height)
        sums: PortionSums[Tensor] = PortionSums(portions, height=self.config.height)
        for portion in range(index * size, min(portions, (index + 1) * size)):
            loss = self._portion(portion)
            if not self.computed:
                self._check(portion, loss)
            self.computed += 1
            losses.add(0, portion, loss)
            sums.add(0, portion, self.buffer.grad.clone())
        loss_sum, gradient = losses.result(index), sums.result(index)
        assert loss_sum is not None
        assert gradient is not None
        return loss_sum, gradient

    def _portion(self, portion: int) -> float:
        self.buffer.zero_grad()
        with torch.enable_grad():
            loss = self._loss(self.model, portion)
            loss.backward()  # type: ignore[no-untyped-call]
        for index in range(len(self.buffer)):
            self.buffer.restore_gradient(index)
        return float(loss.detach())

    def _check(self, portion: int, loss: float) -> None:
        again = self._portion(portion)
        if abs(again - loss) > SAME_POINT * abs(loss):
            raise ValueError(
                f"portion {portion} gave the loss {loss} and then {again} at the same parameters; "
                "it must be a function of them alone, as any worker may compute it: call "
                "model.eval() or set dropout to 0, and draw nothing at random"
            )
