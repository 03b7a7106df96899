"""DistillConfig: [distill], from which teacher a run learns beside its labels, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from pyops.distill import DistillationConfig

__all__ = ["DistillConfig"]


@dataclass(frozen=True)
class DistillConfig:
    """What a run learns from a teacher (Hinton et al., arXiv:1503.02531; Sanh et al.,
    arXiv:1910.01108).

    Attributes:
        teacher: Of a run that trains a Hugging Face folder: another such folder of the same
            vocabulary, or a finished run over one; of a task over images or passages: the folder of
            a run of the same task, whose newest checkpoint it is. "": none.
        soft: Weight of the divergence from the teacher.
        hard: Weight of the labels' cross entropy.
        hidden: Weight of the comparison of hidden states, of a folder's model.
        kind: Of divergence: forward, reverse, jsd or squared.
        temperature: By which both sides' logits are divided.
        b: Of jsd, the teacher's share of the mixture.
        compare: How hidden states are compared: cosine, normalized or squared.
        layers: Pairs of the student's and the teacher's layers whose outputs are compared, such as
            [[0, 1], [-1, -1]]; -1 is the last.
        keep: The numbers of the layers that the student begins with, in place of all: of a run over
            a folder that folder's; of a task the teacher's. []: the student begins as without a
            teacher.
    """

    teacher: str = ""
    soft: float = 0.5
    hard: float = 0.5
    hidden: float = 0.0
    kind: str = "forward"
    temperature: float = 2.0
    b: float = 0.5
    compare: str = "cosine"
    layers: tuple[tuple[int, int], ...] = ((-1, -1),)
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for before, number in zip((-1, *self.keep), self.keep, strict=False):
            if number <= before:
                raise ValueError(
                    f"keep is {list(self.keep)}; give numbers of layers from 0 on, each once, in "
                    "their order"
                )
        if not self.on:
            for field in fields(self):
                if (value := getattr(self, field.name)) != field.default:
                    raise ValueError(
                        f'{field.name} is {value!r}, but teacher is "": name one, or leave the '
                        "section out"
                    )
        self.options  # noqa: B018  # which checks the fields

    @property
    def on(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher)

    @property
    def options(self) -> DistillationConfig:
        """What `pyops.distill` takes."""
        own = ("teacher", "keep")
        return DistillationConfig(**{k: v for k, v in asdict(self).items() if k not in own})
