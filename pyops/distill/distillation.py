"""The loss of distillation: what the teacher says of each word, the words themselves, and hidden
states, each with its weight.

    loss = soft T^2 divergence(teacher, student) + hard cross entropy + hidden comparison

Each term is the mean over the tokens that count. The divergence and the cross entropy are computed
in one pass over the two last layers, without whole logits of either model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyops.distill.batch import Batch, call_model
from pyops.distill.head_input import VocabularyLogits, vocabulary_logits
from pyops.distill.hidden_states import COMPARED, compared, recorded
from pyops.distill.teacher import check_teacher
from pyops.tensor_parallel import DivergenceConfig
from pyops.tensor_parallel.functional.losses.linear_kl_divergence import DivergenceSums

__all__ = ["Distillation", "DistillationConfig", "DistillationLoss"]

Recorded = AbstractContextManager[dict[int, Tensor]]


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """What a student learns from.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    soft: float = 0.5
    """Weight of the divergence from the teacher, which is multiplied by T^2 as well."""
    hard: float = 0.5
    """Weight of the cross entropy of the targets."""
    hidden: float = 0.0
    """Weight of the comparison of hidden states."""
    kind: str = "forward"
    """Which divergence: "forward", "reverse", "jsd" or "squared", see `DivergenceConfig`."""
    temperature: float = 2.0
    """T; for "squared" 1."""
    b: float = 0.5
    """Of "jsd", see `DivergenceConfig`."""
    compare: str = "cosine"
    """How hidden states are compared: "cosine", "normalized" or "squared"."""
    layers: tuple[tuple[int, int], ...] = ((-1, -1),)
    """Pairs of a student's and a teacher's layer whose outputs are compared; -1 is the last."""

    def __post_init__(self) -> None:
        weights = {"soft": self.soft, "hard": self.hard, "hidden": self.hidden}
        for name, weight in weights.items():
            if not weight >= 0:
                raise ValueError(f"{name} is {weight}; a weight is 0 or more")
        if self.soft + self.hard == 0:
            raise ValueError("soft and hard are 0; a student needs the teacher's words or its own")
        self.divergence().form.check()
        if self.compare not in COMPARED:
            raise ValueError(f"compare is {self.compare!r}; choose one of {', '.join(COMPARED)}")
        if self.hidden and not self.layers:
            raise ValueError(f"hidden is {self.hidden} and layers is empty; name pairs of layers")

    def divergence(self, vocab_size: int | None = None) -> DivergenceConfig:
        """The options of the pass over the last layers."""
        return DivergenceConfig(
            kind=self.kind,
            temperature=self.temperature,
            b=self.b,
            hard=self.hard / (self.soft + self.hard),
            vocab_size=vocab_size,
        )


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a batch, and its terms before their weights: means over the tokens that count,
    in nats where they are, without gradient."""

    loss: Tensor
    """What to call backward() of."""
    soft: Tensor
    """The divergence, times T^2."""
    hard: Tensor
    """The cross entropy."""
    hidden: Tensor
    """The comparison of hidden states; 0 where it has no weight."""
    count: Tensor
    """How many tokens count. Over several copies of the model, multiply loss by
    count / (mean count of the copies), so that each token weighs the same."""


class Distillation(nn.Module):
    """loss(student, teacher, batch, targets).

    Args:
        config: see `DistillationConfig`; None: its defaults.
        student_width: of hidden states; with another teacher_width each pair of layers has a
            projection, a parameter of this module: give parameters() to the optimizer as well.
        teacher_width: see student_width.
    """

    def __init__(
        self,
        config: DistillationConfig | None = None,
        *,
        student_width: int | None = None,
        teacher_width: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config or DistillationConfig()
        self.projections = nn.ModuleList()
        if (
            self.config.hidden
            and student_width
            and teacher_width
            and student_width != teacher_width
        ):
            self.projections.extend(
                nn.Linear(student_width, teacher_width, bias=False) for _ in self.config.layers
            )

    def forward(
        self, student: nn.Module, teacher: nn.Module, batch: Batch, targets: Tensor
    ) -> DistillationLoss:
        """The loss of the student.

        Args:
            student: a language model of pyops or of transformers.
            teacher: another of the same vocabulary, frozen (`freeze`), on the same ranks or whole
                on each.
            batch: what both models are called with: tokens [B, T], or a mapping of arguments.
            targets: [B, T] int64, the word that each position's logits are for (the next one of a
                decoder: tokens moved by one); -100 does not count.

        Raises:
            ValueError: a teacher that is not frozen; models that change their logits after the
                last layer; other vocabularies; hidden states of other widths without a projection.
        """
        check_teacher(teacher)
        with self.recorded_student(student) as own:
            ours = vocabulary_logits(student, lambda: call_model(student, batch))
        with torch.no_grad(), self.recorded_teacher(teacher) as other:
            theirs = vocabulary_logits(teacher, lambda: call_model(teacher, batch))
        sums, hidden = self.summed(ours, theirs, own, other, targets)
        count = sums.count.clamp(min=1)
        return DistillationLoss(
            self._weighted(sums, hidden) / count,
            sums.soft / count,
            sums.hard / count,
            hidden.detach() / count,
            sums.count,
        )

    def _weighted(self, sums: DivergenceSums, hidden: Tensor) -> Tensor:
        config = self.config
        return (config.soft + config.hard) * sums.total + config.hidden * hidden

    def total(
        self,
        ours: VocabularyLogits,
        theirs: VocabularyLogits,
        own: dict[int, Tensor],
        other: dict[int, Tensor],
        targets: Tensor,
    ) -> Tensor:
        """The loss as a sum over the tokens that count, of what both models gave.

        Args:
            ours: of the student.
            theirs: of the teacher.
            own: the student's hidden states by layer, of those that are compared.
            other: the teacher's.
            targets: as of `forward`.

        Raises:
            ValueError: as `forward`.
        """
        return self._weighted(*self.summed(ours, theirs, own, other, targets))

    def summed(
        self,
        ours: VocabularyLogits,
        theirs: VocabularyLogits,
        own: dict[int, Tensor],
        other: dict[int, Tensor],
        targets: Tensor,
    ) -> tuple[DivergenceSums, Tensor]:
        """The sums of the terms over the tokens that count; see `total`.

        Args:
            ours: The student's logits, as hidden states and weight of the head.
            theirs: The teacher's.
            own: The student's hidden states, by layer.
            other: The teacher's.
            targets: int64 of the tokens on this rank, below 0 where none counts.

        Returns:
            The sums of the logits' terms, and that of the hidden states.
        """
        if ours.vocab_size != theirs.vocab_size:
            raise ValueError(
                f"the student knows {ours.vocab_size} words, the teacher {theirs.vocab_size}; "
                "a student learns from a teacher of its vocabulary"
            )
        sums = DivergenceSums.of(
            ours.of(ours.ranks),
            theirs.of(ours.ranks),
            targets,
            group=ours.ranks,
            config=self.config.divergence(ours.vocab_size),
        )
        return sums, self._hidden(own, other, targets)

    def recorded_student(self, student: nn.Module) -> Recorded:
        """Within it the hidden states that are compared are kept, by layer."""
        return _record(student, [i for i, _ in self._pairs])

    def recorded_teacher(self, teacher: nn.Module) -> Recorded:
        """As `recorded_student`, of the teacher's layers."""
        return _record(teacher, [j for _, j in self._pairs])

    @property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        return self.config.layers if self.config.hidden else ()

    def _hidden(self, own: dict[int, Tensor], other: dict[int, Tensor], targets: Tensor) -> Tensor:
        """The sum of all pairs over the tokens that count."""
        total = torch.zeros((), device=targets.device)
        if not self.config.hidden:
            return total
        for pair, (i, j) in enumerate(self.config.layers):
            h, t = own[i], other[j]
            if self.projections:
                h = self.projections[pair](h)
            if h.shape != t.shape or h.shape[:-1] != targets.shape:
                raise ValueError(
                    f"the student's layer {i} gives {list(own[i].shape)}, the teacher's layer {j} "
                    f"{list(t.shape)}, targets are {list(targets.shape)}; hidden states need the "
                    "same tokens on a rank, and a projection between widths that differ: "
                    "Distillation(config, student_width=, teacher_width=)"
                )
            total = total + (compared(self.config.compare, h, t) * (targets != -100)).sum()
        return total / len(self.config.layers)


def _record(model: nn.Module, layers: list[int]) -> Recorded:
    """`recorded`; also of a model without a list of layers where none is asked for."""
    return recorded(model, layers) if layers else nullcontext({})
