"""Task: samples with numbers to learn from, the model that learns them, its loss and its score."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.context_parallel import ContextRanks
from pyops.distill import ClassTeacher
from pyops.elastic import PADDING
from pyops.models.vocabulary_head import IGNORED

__all__ = ["Batch", "NatsTask", "Task"]

Batch = tuple[Tensor, Tensor, dict[str, Any]]


class Task(ABC):
    """samples: to train on, numbered from 0. held_out: likewise, to score. block_count: blocks of
    the model between first layer and head. first_layer: its name in the model. tokens: T, which a
    row has between them. told_shape: layers are given shape=(rows, tokens). terms: what a row's
    loss is divided by: gradients' scale is 1 / (rows * terms). metric: what a row's score is,
    "accuracy" (the more the better), or "nats" for each of held_out_terms. digest: of the data and
    its split, where they are read from files; "" where the numbers of samples tell them apart.
    """

    name: str
    samples: int
    held_out: int
    block_count: int
    tokens: int
    terms: int = 1
    held_out_terms: int = 1
    first_layer: str = "embedding"
    told_shape: bool = True
    metric: str = "accuracy"
    digest: str = ""
    places: Tensor | None = None
    """int64 [n]: the places of the tokens of a row that this rank has, so that losses and scores
    are summands of the ranks; None: it has all."""
    teacher: ClassTeacher | None = None
    """Of a task that scores accuracy: what the samples to train on are learnt from, beside their
    labels; None: nothing."""
    _config: Any

    @abstractmethod
    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        """A model with `layers()`: embedding, blocks, head.

        Args:
            seed: As of GPT.
            device: Of the parameters.
            dtype: Of the parameters.
            context: The ranks that share out the tokens of rows, as of GPT.
        """

    def model_like(self, config: Any, **options: Any) -> nn.Module:
        """As `model`, of other sizes.

        Args:
            config: Of the model.
            options: As of `model`.
        """
        other = copy.copy(self)
        other._config = config
        return other.model(**options)

    @property
    def layer_names(self) -> list[str]:
        """The names that the model's `layers()` have in it."""
        return [self.first_layer, *(f"blocks.{i}" for i in range(self.block_count)), "head"]

    def batch(self, samples: Tensor, *, epoch: int = 0, held_out: bool = False) -> Batch:
        """(inputs of the first layer [n, ...], target [n] or [n, T], named arguments of layers) of
        samples int64 [n].

        Named tensors [n, ...] are to be cut like the batch, the rest goes whole; `shape` is for the
        caller to add. Rows of sample PADDING have some input, and no target that counts.

        Args:
            held_out: Numbers are of the held-out samples.

        Raises:
            ValueError: For a number that no sample has.
        """
        bound = self.held_out if held_out else self.samples
        padding = samples == PADDING
        numbers = samples[~padding]
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < bound:
            what = "held-out samples" if held_out else "samples"
            raise ValueError(
                f"samples are numbered {int(numbers.min())} to {int(numbers.max())}; "
                f"{self.name} has {bound} {what}: give "
                f"numbers from 0 to {bound - 1}, or pyops.elastic.PADDING for rows that don't count"
            )
        rows = samples.masked_fill(padding, 0)
        inputs, target = self._rows(rows, epoch, held_out)
        target = self.padding(target, samples)
        if self.teacher is not None and not held_out:
            target = self.teacher.targets(rows, inputs, target)
        return inputs, target, self._named(target, held_out)

    @abstractmethod
    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples."""

    def _named(self, target: Tensor, held_out: bool) -> dict[str, Any]:
        return {}

    @staticmethod
    def padding(target: Tensor, samples: Tensor) -> Tensor:
        """target with nothing that counts in rows of sample PADDING."""
        return torch.where(
            (samples == PADDING).view(-1, *[1] * (target.dim() - 1)), IGNORED, target
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """-ln p(target), summed over what counts; with a teacher its loss.

        Args:
            output: Of the last layer. Scalar, fp32 (fp64 of an fp64 model).
        """
        output = output if output.dtype == torch.float64 else output.float()
        if self.teacher is not None:
            return self.teacher.total(output, target)
        found = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
        return found if self._has_first else found * 0.0

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """By `metric`: how many of the rows that count are right; or their nats.

        Args:
            output: Of held-out rows. fp64 scalar.
        """
        right = (output.argmax(dim=-1) == target).sum().double()  # no label is IGNORED
        return right if self._has_first else right * 0.0

    @property
    def _has_first(self) -> bool:
        """Whether the first token of a row is this rank's, on which what all ranks compute of it
        counts."""
        return self.places is None or bool((self.places == 0).any())

    def augmentation(self, epoch: int) -> int:
        """A number that tells apart the inputs that a sample has in different epochs; 0 where they
        are always the same."""
        return 0


class NatsTask(Task):
    """A task whose head gives the loss itself: summed, or of held-out rows one number for each
    target."""

    metric = "nats"

    def _named(self, target: Tensor, held_out: bool) -> dict[str, Any]:
        return {"targets_BT": target, "reduction": "none" if held_out else "sum"}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        return output.double().sum()
