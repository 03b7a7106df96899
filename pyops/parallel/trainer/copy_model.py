"""CopyModel: one copy of a model, run on the rows of that copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyops.parallel.dropout.keyed_dropout import set_keyed_dropout
from pyops.parallel.fused_head import LABELS
from pyops.parallel.rows.batches import BatchShare, microbatches, model_arguments
from pyops.parallel.trainer.trainer_parts import TrainerParts

__all__ = ["CopyModel"]


class CopyModel:
    """This rank's part of a copy of the model.

    Args:
        parts: Of the trainer.
        accepted: Names of the arguments that the model takes.
    """

    def __init__(self, parts: TrainerParts, accepted: frozenset[str]) -> None:
        self._parts, self._accepted = parts, accepted
        self._dropouts = [
            (name, module)
            for name, module in parts.model.named_modules()
            if hasattr(module, "set_dropout_state") and parts.layered is None
        ]

    def differentiate(self, batch: dict[str, Any], share: BatchShare, *, step: int) -> Tensor:
        """Forward and backward of this copy's rows: the sum of their losses.

        Args:
            batch: The rows, and of each the tokens that this rank has.
            share: What the rows are of the global batch.
            step: The number of the step, on which dropout depends.
        """
        optimizer, loss = self._parts.optimizer, self._parts.loss
        scale = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.scale
        scale /= share.divisor
        if self._parts.staged is not None:
            return self._differentiate_stages(batch, share, scale, step)
        total = torch.zeros((), dtype=torch.float64, device=self._parts.device)
        row = share.first_row
        several = microbatches(batch, self._parts.plan.num_microbatches)
        for number, rows in enumerate(several):
            self._key_dropout(rows, row, step)
            row += _num_rows(rows)
            last = number + 1 == len(several)
            with nullcontext() if last else optimizer.no_sync():
                summed = loss.sum(self._outputs(rows), rows)
                (summed * scale).backward()
            total += summed.detach()
        return total

    def _differentiate_stages(
        self, batch: dict[str, Any], share: BatchShare, scale: float, step: int
    ) -> Tensor:
        staged = self._parts.staged
        assert staged is not None
        several = microbatches(batch, self._parts.plan.microbatches)
        starts = list(itertools.accumulate(map(_num_rows, several), initial=share.first_row))
        staged.before_forward = lambda number: self._key_dropout(
            several[number], starts[number], step
        )
        arguments = self._stage_arguments(batch)
        with self._parts.optimizer.no_sync():
            return staged.step(arguments, batch, rows=_num_rows(batch), scale=scale)

    def _outputs(self, rows: dict[str, Any]) -> Any:
        """What the model returns for these rows, or their loss."""
        arguments = model_arguments(rows, self._accepted)
        model, head = self._parts.model, self._parts.head
        if head is None:
            return model(**arguments)
        return head.call(lambda: model(**arguments), rows["labels"], arguments)

    def _stage_arguments(self, batch: dict[str, Any]) -> dict[str, Any]:
        arguments = model_arguments(batch, self._accepted)
        return arguments if self._parts.head is None else {**arguments, LABELS: batch["labels"]}

    def _key_dropout(self, rows: Mapping[str, Any], first_row: int, step: int) -> None:
        """Before the forward of these rows, of which the first has this number in the batch."""
        layered, seed = self._parts.layered, self._parts.seed
        if layered is not None:
            layered.module.set_dropout(
                layered.shape(rows), seed=seed, step=step, first_row=first_row
            )
        elif self._dropouts:
            set_keyed_dropout(self._dropouts, seed=seed, step=step, first_row=first_row)

    def summed(self, batch: dict[str, Any]) -> Tensor:
        """The sum of the losses of this copy's rows, without gradients.

        Args:
            batch: The rows, and of each the tokens that this rank has.
        """
        staged = self._parts.staged
        if staged is not None:
            arguments = self._stage_arguments(batch)
            found: Tensor = staged.evaluate(arguments, batch, rows=_num_rows(batch))
            return found.to(self._parts.device)
        total = torch.zeros((), dtype=torch.float64, device=self._parts.device)
        for rows in microbatches(batch, self._parts.plan.num_microbatches):
            total += self._parts.loss.sum(self._outputs(rows), rows)
        return total

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, the model has no dropout; its mode afterwards is the one of before."""
        was = self._parts.model.training
        self._parts.model.eval()
        if self._parts.staged is not None:
            self._parts.staged.before_forward = lambda number: None
        try:
            yield
        finally:
            self._parts.model.train(was)


def _num_rows(batch: Mapping[str, Any]) -> int:
    return len(next(v for v in batch.values() if isinstance(v, Tensor) and v.dim()))
