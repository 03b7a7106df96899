"""TaughtHead: the loss of distillation within the last layer of a student, for a trainer that calls
the student itself, on any layout of the ranks.

    student(tokens) --> blocks --> head:  teacher(tokens) --> blocks --> head:  the loss, of what
                                                                         both heads were given
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyops.distill.batch import call_model
from pyops.distill.distillation import Distillation, DistillationConfig
from pyops.distill.head_input import VocabularyLogits, use_vocabulary_logits
from pyops.distill.teacher import check_teacher

__all__ = ["TaughtHead"]


class TaughtHead:
    """A teacher, and how a student learns from it; see `pyops.parallel.losses.LabelLoss`.

    Args:
        teacher: frozen (`freeze`); None on a rank that has no last layer of the student.
        config: see `DistillationConfig`. Hidden states that are compared are of one width.
        owner: kept as long as the teacher, such as the trainer that shares its parameters out.

    Raises:
        ValueError: a teacher that is not frozen.
    """

    def __init__(
        self, teacher: nn.Module | None, config: DistillationConfig, *, owner: object = None
    ) -> None:
        self.teacher, self.config, self._owner = teacher, config, owner
        self._distillation = Distillation(config)
        self._arguments: dict[str, Any] = {}
        self._own: dict[int, Tensor] = {}
        self._accepted: frozenset[str] = frozenset()
        if teacher is not None:
            check_teacher(teacher)
            self._accepted = frozenset(inspect.signature(teacher.forward).parameters)

    def check(self, tokens: Tensor) -> None:
        """Call the teacher once. A collective of the ranks that share it.

        Args:
            tokens: int64 [B, T].

        Raises:
            ValueError: a teacher without a last layer of which the loss could be computed.
        """
        teacher = self.teacher
        assert teacher is not None
        with torch.no_grad():
            use_vocabulary_logits(teacher, lambda: teacher(input_ids=tokens), lambda logits: None)

    def forget_teacher(self) -> None:
        """On a rank that never calls `sum`."""
        self.teacher = self._owner = None

    @contextmanager
    def around(self, student: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
        """The student is called within.

        Args:
            student: whose last layer then calls `sum`.
            arguments: of its forward, by name; the teacher gets those that it takes.
        """
        self._arguments = {k: v for k, v in arguments.items() if k in self._accepted}
        try:
            with self._distillation.recorded_student(student) as self._own:
                yield
        finally:
            self._arguments, self._own = {}, {}

    def sum(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss, summed over the tokens that count.

        Args:
            head: the student's last layer, whole or this rank's words.
            hidden: [B, T, H], what it is given.
            targets: [B, T] int64, as of `Distillation`.

        Raises:
            ValueError: as `Distillation`.
        """
        teacher, ours = self.teacher, VocabularyLogits(head, hidden)
        assert teacher is not None

        def use(theirs: VocabularyLogits) -> Tensor:
            with torch.enable_grad():
                return self._distillation.total(ours, theirs, self._own, other, targets)

        with torch.no_grad(), self._distillation.recorded_teacher(teacher) as other:
            return use_vocabulary_logits(teacher, lambda: call_model(teacher, self._arguments), use)
