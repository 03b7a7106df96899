"""FusedHead: the last layer of a language model and its cross entropy in one, so that the logits of
all tokens never exist.

    logits alone      head(hidden [rows, T, H])  ->  [rows, T, V]  ->  model returns them
    with labels       head(hidden [rows, T, H])  ->  the sum of the losses, in the place of the
                                                     logits; the model returns it untouched

A model that does something to its logits (Gemma 2 squashes them) returns another tensor than its
head gave. That shows at the first call, which is then made again with logits, and so are all later
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

from pyops import random
from pyops.mesh import ALONE
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    LinearCrossEntropyConfig,
    linear_cross_entropy,
)

__all__ = ["LABELS", "FusedHead", "HeadLoss", "SummedLoss", "head_name"]

LABELS = "fused_head_labels"  # the argument of a stage by which labels reach the head


@dataclass(frozen=True)
class SummedLoss:
    """What a model gives in the place of its outputs where its head computes the loss."""

    nats: Tensor
    """The sum over the labels that count, a tensor of one number."""


class HeadLoss(Protocol):
    """Another loss than the cross entropy, which the last layer computes in training:
    `pyops.distill.TaughtHead`."""

    def around(
        self, student: nn.Module, arguments: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """The model is called within, with these arguments."""
        ...

    def sum(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum over the targets [rows, T] that count, of what the last layer is given."""
        ...


def head_name(model: nn.Module) -> str | None:
    """The name of the module that gives the logits of a model of transformers; None where there is
    none, or where it is no linear layer alone.

    Args:
        model: Cut by tensor parallelism or not.
    """
    get = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    if type(head) not in (nn.Linear, ColumnParallelLinear) or "forward" in vars(head):
        return None
    return next((name for name, each in model.named_modules() if each is head), None)


class FusedHead:
    """Lets the head of a model compute the loss.

    Args:
        model: The model, or this rank's stages of it.
        head: Its linear layer, which may hold a part of the vocabulary.
        shifts: Whether the labels are the tokens of the input, and each position predicts the next
            one.
        ignored: The label that does not count.
        loss: What is computed in training; None: the cross entropy, which is what is computed in
            evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module,
        *,
        shifts: bool,
        ignored: int,
        loss: HeadLoss | None = None,
    ) -> None:
        self._model, self._head, self._loss = model, head, loss
        self.shifts, self.ignored = shifts, ignored
        self._labels: Tensor | None = None
        self._given: Tensor | None = None
        self.fits: bool | None = None  # not known before the first call
        self._with_logits = head.forward
        # Of the module alone: hooks run around it, and other models keep their heads.
        head.forward = self._forward  # type: ignore[method-assign]

    def call(
        self, run: Callable[[], Any], labels: Tensor | None, arguments: Mapping[str, Any]
    ) -> Any:
        """What the model returns; or its loss, as a SummedLoss.

        Args:
            run: Calls the model.
            labels: Of the rows [rows, T]; None: only logits will do.
            arguments: Of the model, by name.

        Raises:
            ValueError: The model does something to its logits, which the loss can't do without.
        """
        if labels is None or self.fits is False:
            return run()
        states = None if self.fits else random.states_of(self._model)
        self._labels, loss = labels, self._loss_of_now
        try:
            with nullcontext() if loss is None else loss.around(self._model, arguments):
                outputs = run()
        finally:
            given, self._given, self._labels = self._given, None, None
        if given is not None and outputs["logits"] is given:
            self.fits = True
            return SummedLoss(given.reshape(()))
        if loss is not None:
            raise ValueError(
                f"{type(self._model).__name__} does something to its logits after its last layer, "
                "so that the loss can't be computed there; it can't learn from a teacher"
            )
        self.fits = False
        with random.with_states(states or []):  # with the dropout of the first call
            return run()

    @property
    def _loss_of_now(self) -> HeadLoss | None:
        return self._loss if self._model.training else None

    def _forward(self, hidden: Tensor) -> Any:
        labels = self._labels
        if labels is None or hidden.shape[:-1] != labels.shape:
            return self._with_logits(hidden)
        if self.shifts:
            labels = functional.pad(labels[..., 1:], (0, 1), value=self.ignored)
        self._given = self._sum(hidden, labels.to(hidden.device)).reshape(1, 1, 1)
        return self._given

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head: Any = self._head
        if (loss := self._loss_of_now) is not None:
            return loss.sum(head, hidden, labels)
        cut = isinstance(head, ColumnParallelLinear)
        return linear_cross_entropy(
            hidden,
            head.weight,
            labels,
            bias=head.bias,
            group=head.plan.ranks if cut else ALONE,
            reduction="sum",
            config=LinearCrossEntropyConfig(
                vocab_size=head.out_features, ignore_index=self.ignored
            ),
        )
