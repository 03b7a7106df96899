"""Batch norm in a pipeline: a micro-batch is normalised by its own statistics; those kept for
evaluation are the whole batch's.

    micro-batch 0   n, mean, variance --.
    micro-batch 1   n, mean, variance --+-- n, mean, variance of all of them --> running_mean,
                    running_var, once a step
    micro-batch 2   n, mean, variance --'

torch would count every micro-batch as a batch, and one that is computed again twice. Means and sums
of squared deviations are merged in float64 (Chan, Golub and LeVeque, 1983), which cancels nothing,
and the variance is the unbiased one, as in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from pyops.pipeline.runtime.stage import Stage

__all__ = ["BatchNormStatistics"]


class Tally:
    """Rows seen so far, their mean, and the sum of their squared deviations from it."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """variance: the unbiased one, of `count` rows."""
        total = self.count + count
        difference = mean.double() - self.mean
        self.mean = self.mean + difference * (count / total)
        self.squares = (
            self.squares
            + variance.double() * (count - 1)
            + difference.square() * (self.count * count / total)
        )
        self.count = total


class BatchNormStatistics:
    """The running statistics of all torch.nn BatchNorm layers in `stages`, whose `forward` is
    replaced on the instance.

    Layers that keep none, or have a forward of their own, and SyncBatchNorm are left as they are. A
    layer that is called several times in a step counts all that it is given as one batch.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self.stages = list(stages)
        self._tallies: dict[_BatchNorm, Tally] | None = None
        for module in (
            module for stage in self.stages for layer in stage.layers for module in layer.modules()
        ):
            known = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
            own = module.__dict__.get("forward")
            if (
                known
                and module.running_mean is not None
                and (own is None or isinstance(own, _BatchNormForward))
            ):
                module.forward = _BatchNormForward(module, self)  # type: ignore[method-assign,arg-type]

    def remove(self) -> None:
        """Give the layers their own forward again."""
        for module in (
            module for stage in self.stages for layer in stage.layers for module in layer.modules()
        ):
            own = module.__dict__.get("forward")
            if isinstance(own, _BatchNormForward) and own.statistics is self:
                del module.forward

    @contextlib.contextmanager
    def of_one_batch(self) -> Iterator[None]:
        """What layers are given within is one batch: at the end their running statistics move on by
        it, unless this raises."""
        tallies: dict[_BatchNorm, Tally] = {}
        self._tallies = tallies
        try:
            yield
            for norm, tally in tallies.items():
                _commit(norm, tally)
        finally:
            self._tallies = None

    def apply(self, norm: _BatchNorm, x: Tensor) -> Tensor:
        """`norm` of x [rows, channels, ...]; within `of_one_batch` its running statistics stay as
        they are."""
        if self._tallies is None or not norm.training:
            return _BatchNorm.forward(norm, x)
        norm._check_input_dim(x)
        assert isinstance(norm.running_mean, Tensor)
        # BatchNormStatistics that move all the way are the micro-batch's: no second pass over x.
        mean, variance = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_mean)
        y = functional.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
        if not any(stage.recomputing for stage in self.stages):
            self._tallies.setdefault(norm, Tally()).add(x.numel() // x.shape[1], mean, variance)
        return y


class _BatchNormForward:
    """Stands in for the forward of a layer."""

    def __init__(self, norm: _BatchNorm, statistics: BatchNormStatistics) -> None:
        self.norm, self.statistics = norm, statistics

    def __call__(self, input: Tensor) -> Tensor:
        return self.statistics.apply(self.norm, input)


@torch.no_grad()
def _commit(norm: _BatchNorm, tally: Tally) -> None:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    part = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    for running, found in ((mean, tally.mean), (variance, tally.squares / (tally.count - 1))):
        running.copy_(running.double() * (1.0 - part) + found * part)
