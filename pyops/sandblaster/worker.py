"""Worker: a model that computes the loss and the gradient of some portions on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyops.flat import FlatBuffer
from pyops.parameter_server.vectors import check_model, cut, named_parameters
from pyops.sandblaster.tree_sum import TreeSum

__all__ = ["Worker"]


class Worker:
    """A replica of the model, whose parameters are those of the shards' trial point.

    Args:
        model: Its parameters, in their order, are the vector that the shards have parts of.
        loss: Given the model and the number of a portion, its loss: portions' losses add up to that
            of the batch, so that a mean is divided by the size of the batch, not of the portion.
            A function of the parameters alone.

    Raises:
        ValueError: For a model whose parameters shards can't hold, or with running statistics,
            which make a loss that is no function of the parameters.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> None:
        check_model(model, buffers="refuse", codecs=False)
        self.model, self._loss = model, loss
        self.buffer = FlatBuffer(named_parameters(model))

    def parts(self, shards: int) -> list[Tensor]:
        """The parameters as each shard begins with them: one part for each, in new memory.

        Args:
            shards: How many there are.

        Raises:
            ValueError: Where a shard would have none.
        """
        starts = cut(self.model, shards=shards)
        return [self.buffer.data[a:b].clone() for a, b in pairwise(starts)]

    def compute(self, values: Tensor, portions: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The loss and the gradient of portions that follow each other.

        Args:
            values: The parameters [numel].
            portions: Their numbers, the leaves of a node of TreeSum.

        Returns:
            (loss, float64 [1]; gradient [numel]), in new memory.
        """
        numbers = list(portions)
        self.buffer.data.copy_(values)
        losses, gradients = TreeSum(len(numbers)), TreeSum(len(numbers))
        for index, portion in enumerate(numbers):
            self.buffer.zero_grad()
            with torch.enable_grad():
                loss = self._loss(self.model, portion)
                loss.backward()
            for number in range(len(self.buffer)):
                self.buffer.restore_gradient(number)
            losses.add(loss.detach().double().reshape(1).cpu(), index=index)
            gradients.add(self.buffer.grad.clone(), index=index)
        return losses.total, gradients.total
