"""PipelineConfig and PipeMareOptions: the options of a Pipeline, and what an asynchronous one does
about stale weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pyops.pipeline.runtime.stage import Stage

__all__ = ["REDUCTIONS", "MakeOptimizer", "PipeMareOptions", "PipelineConfig"]

REDUCTIONS = ("mean", "sum")
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class PipelineConfig:
    """How a Pipeline cuts the model, and how the losses of the micro-batches become one.

    All ranks give the same; the Pipeline raises ValueError on every rank where they do not.
    """

    boundaries: Sequence[int] | None = None
    """The first layer of each stage and, last, the number of layers, as `balance` returns them.
    None: the stages have about equally many parameters."""

    reduction: str = "mean"
    """What the loss function computes of its micro-batch: "mean" or "sum"."""

    loss_denominator: Callable[[Any], Any] | None = None
    """(target of a micro-batch) -> the number of terms of which its loss is the mean, such as the
    tokens that are not padding. None: the rows."""

    tied: Sequence[Sequence[str]] | None = ()
    """Groups of names, such as ("0.weight", "5.head.weight"), of parameters that are one although
    they are not one object. Parameters that layers of several stages share as one object are found.
    Each rank has a copy, which begins with the values of the first; after a step the `.grad` of
    each copy is the sum over all copies. None: the pipeline does not reduce tied gradients; pass
    pp_group to ZeroOptimizer, which does."""

    before_forward: Callable[[Stage, int], None] | None = None
    """Called with the stage and the number of the micro-batch before each forward, such as to set
    the key of its dropout."""


@dataclass(frozen=True)
class PipeMareOptions:
    """What an asynchronous pipeline does about weights that are older than the step to which their
    gradient belongs (PipeMare, Yang et al., MLSys 2021, sections 3 and 4).

    Raises:
        ValueError: a field is out of its range.
    """

    anneal: int = 0
    """T1, in steps: step k of a stage whose weights are `delay` steps old (`Schedule.delay`) has
    its learning rate divided by delay ** (1 - min(k / anneal, 1)), or by nothing where delay is
    less than 1. 0: the learning rate is left as it is."""

    decay: float | None = None
    """T2, for schedules of weights "newest": backward meets an estimate of the weights that forward
    met (`pyops.pipeline.runtime.weight_versions.CorrectedWeights`). The paper uses exp(-2). None:
    backward meets the newest weights."""

    synchronous: float = 0
    """T3: the number of calls of `step`, at the beginning, in which no micro-batch is in flight
    during an optimizer step; math.inf for all calls. Their steps do not count for `anneal`."""

    def validate(self) -> None:
        """Check every field. Local: no rank is asked.

        Raises:
            ValueError: Naming field, value and what it must be.
        """
        if isinstance(self.anneal, bool) or not isinstance(self.anneal, int) or self.anneal < 0:
            raise ValueError(
                f"anneal is {self.anneal!r}; give the number of steps until the learning rate is "
                "whole, 0 or more"
            )
        if self.decay is not None and not 0 < self.decay < 1:
            raise ValueError(
                f"decay is {self.decay!r}; give a number between 0 and 1, such as exp(-2), or None"
            )
        if not self.synchronous >= 0:
            raise ValueError(
                f"synchronous is {self.synchronous!r}; give the number of calls of step that are "
                "synchronous, 0 or more"
            )
