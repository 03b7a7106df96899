"""Losses as (sum, count): what a micro-batch adds to the sum of all rows, and by how many terms all
rows of a step are divided, once.

    rank 0   rows 0 1   count 5 + 3 tokens --.
    rank 1   row 2      count 7 tokens     --+--> 15   gradients of each sum are multiplied by
                                                       1 / 15 where backward begins

So padding, accumulation, uneven shares and the number of ranks do not change a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.parallel.fused_head import HeadLoss, SummedLoss

__all__ = [
    "IGNORED",
    "Batch",
    "CountOfTerms",
    "CountedLoss",
    "LabelLoss",
    "PairLoss",
    "SumOfRows",
    "loss_of",
    "names_of",
    "padded_rows",
    "predicts_tokens",
]

IGNORED = -100  # a label that does not count, as in transformers and torch
Batch = Mapping[str, Any]
SumOfRows: TypeAlias = Callable[[Any, Batch], Tensor]
CountOfTerms: TypeAlias = Callable[[Batch], float]


@runtime_checkable
class CountedLoss(Protocol):
    """What a trainer asks of a loss."""

    def count(self, batch: Batch) -> float:
        """By how many terms of these rows the sum of all is divided where it is reported."""
        ...

    def divisor(self, batch: Batch) -> float:
        """By how many terms of these rows gradients are divided: the same, but for a loss that is
        reported in another unit, such as per byte of text."""
        ...

    def sum(self, outputs: Any, batch: Batch) -> Tensor:
        """The sum of the terms of these rows, a tensor of one number.

        Args:
            outputs: What the model returned.
            batch: The rows, labels included.
        """
        ...

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        """The batch with further rows that do not count, so that it has `rows`."""
        ...


class LabelLoss:
    """Cross entropy of the logits and the batch's "labels"; -100 does not count.

    Args:
        shifts: Whether the labels are the tokens of the input, and each position predicts the next
            one, as of a causal language model.
        in_head: What the last layer computes in training in the place of the cross entropy, such as
            `pyops.distill.TaughtHead`; it counts the same labels. None: nothing.
    """

    def __init__(self, *, shifts: bool, in_head: HeadLoss | None = None) -> None:
        self.shifts, self.in_head = shifts, in_head

    def _labels(self, batch: Batch) -> Tensor:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            raise ValueError(
                f"the batch has {', '.join(batch) or 'nothing'}, and no labels of whole numbers; "
                "give labels (-100 where one does not count), or loss=(sum, count) of your own"
            )
        return labels[..., 1:] if self.shifts else labels

    def count(self, batch: Batch) -> float:
        """The number of labels that are not -100."""
        return float((self._labels(batch) != IGNORED).sum())

    def divisor(self, batch: Batch) -> float:
        """As `count`."""
        return self.count(batch)

    def sum(self, outputs: Any, batch: Batch) -> Tensor:
        """Nats of the labels."""
        if isinstance(outputs, SummedLoss):
            return outputs.nats
        labels, logits = self._labels(batch), outputs["logits"]
        if self.shifts:  # labels are padded, for a slice of the logits would be copied
            labels = functional.pad(labels, (0, 1), value=IGNORED)
        return functional.cross_entropy(
            logits.flatten(0, -2).float(),
            labels.flatten().to(logits.device),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        """Further rows are copies of the first, with labels of -100."""
        return padded_rows(batch, rows, targets="labels")


class PairLoss:
    """A loss of the caller's own.

    Args:
        sum_: (what the model returned, batch) -> a tensor of one number.
        count: batch -> by how many terms the sum of all rows is divided.
        names: Of what the batch has for the loss, and the model does not take, such as weights of
            the rows: tensors [rows, ...], of which each micro-batch has its own.

    Raises:
        TypeError: `names` is one string.
    """

    def __init__(
        self,
        sum_: SumOfRows,
        count: CountOfTerms,
        *,
        names: Sequence[str] = (),
    ) -> None:
        if isinstance(names, str):
            raise TypeError(f"names is {names!r}; give a tuple of names, ({names!r},)")
        self._sum, self._count, self.names = sum_, count, tuple(names)

    def count(self, batch: Batch) -> float:
        """As the caller says."""
        return float(self._count(batch))

    def divisor(self, batch: Batch) -> float:
        """As `count`."""
        return self.count(batch)

    def sum(self, outputs: Any, batch: Batch) -> Tensor:
        """As the caller says.

        Raises:
            ValueError: It is no tensor of one number.
        """
        found = self._sum(outputs, batch)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise ValueError(
                f"loss: the first function returned {type(found).__name__}"
                f"{list(found.shape) if isinstance(found, Tensor) else ''}; it must return the sum "
                "over the rows, a tensor of one number"
            )
        return found.reshape(())

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        """Raises ValueError: which rows would not count is not known."""
        raise ValueError(
            f"a copy of the model has fewer rows than micro-batches ({rows} are needed here); with "
            "a loss of your own give a multiple of the micro-batches on every rank"
        )


def names_of(loss: CountedLoss) -> tuple[str, ...]:
    """What a batch may have beside the arguments of the model: `loss.names`, where there are any.

    Args:
        loss: Any.
    """
    return tuple(getattr(loss, "names", ()))


def padded_rows(batch: Batch, rows: int, *, targets: str) -> dict[str, Any]:
    """The batch with further rows, copies of the first, so that it has `rows`.

    Args:
        batch: Tensors [rows, ...]; others stay as they are.
        rows: As many or more than there are.
        targets: The name of those that are to be `IGNORED` in further rows.
    """
    found = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim():
            lacking = rows - len(value)
            first = value[:1] if len(value) else value.new_zeros(1, *value.shape[1:])
            more = first.expand(lacking, *value.shape[1:])
            if name == targets:
                more = torch.full_like(more, IGNORED)
            value = torch.cat([value, more])
        found[name] = value
    return found


def loss_of(model: nn.Module, given: object) -> CountedLoss:
    """The loss of a model: the caller's, or the cross entropy of its labels.

    Args:
        model: Of transformers, or any that returns {"logits": ...}.
        given: None, a pair of functions (sum, count), or a CountedLoss.

    Raises:
        TypeError: It is something else.
    """
    if given is None:
        return LabelLoss(shifts=_is_causal(model))
    if isinstance(given, CountedLoss):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2 or not all(map(callable, given)):
        raise TypeError(
            f"loss is {given!r}; give two functions: (outputs, batch) -> the sum over the rows, "
            "and batch -> by how many terms it is divided; or None for the cross entropy of labels"
        )
    return PairLoss(*given)


def predicts_tokens(model: nn.Module) -> bool:
    """Whether a text can be generated with the model: it is causal, or a decoder for conditional
    generation follows an encoder.

    Args:
        model: Of transformers, or any.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    return _is_causal(model) or any(name.endswith("ForConditionalGeneration") for name in names)


def _is_causal(model: nn.Module) -> bool:
    """Whether each position of the model predicts the token after it."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    names = [kind.__name__ for kind in type(model).__mro__]
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
