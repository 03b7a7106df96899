"""The steps of a compression, each a frozen dataclass that a table [[step]] of the TOML file fills,
and the orders in which they have a sense.

    distill -> prune -> finetune -> quantize       any of them may be left out, or repeated
                                    '------> nothing follows: codes of few bits do not learn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pyops.config.config_error import ConfigError, require

__all__ = ["DistillStep", "FinetuneStep", "LayersStep", "Step", "check_order", "step_kinds"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What every step has that learns from the text of [data] train: AdamW, with gradients clipped
    to norm 1, and the learning rate's warm-up and half cosine.

    Raises:
        ValueError: Where a field has no sense, naming it and its value.
    """

    num_steps: int = 200
    """Steps of the optimizer."""
    batch: int = 8
    """Rows of [data] sequence_length tokens in a step, the same ones on any number of ranks."""
    lr: float = 1e-3
    """The highest learning rate."""
    warmup_steps: int = 10
    """Steps in which it rises to that."""
    final_lr_ratio: float = 0.1
    """To what part of it the learning rate falls until the last step."""
    weight_decay: float = 0.0
    """Of weights of two or more dimensions."""
    seed: int = 0
    """Of the order of the rows, and of dropout."""

    method: ClassVar[str] = ""
    least_steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        least = self.least_steps
        require(self, f"{least} or more", ("num_steps",), lambda v: v >= least)
        require(self, "1 or more", ("batch",), lambda v: v >= 1)
        require(self, "more than 0", ("lr",), lambda v: v > 0)
        require(self, "0 or more", ("warmup_steps", "weight_decay", "seed"), lambda v: v >= 0)
        require(self, "between 0 and 1", ("final_lr_ratio",), lambda v: 0 <= v <= 1)

    @property
    def learns(self) -> bool:
        """Whether the step needs text to learn from."""
        return self.num_steps > 0

    @property
    def calibrates(self) -> bool:
        """Whether the step looks at what the layers are given."""
        return False

    @property
    def label(self) -> str:
        """The step in a few words."""
        return self.method


@dataclass(frozen=True, kw_only=True)
class LayersStep(Step):
    """A step that may begin with some of the layers."""

    keep: tuple[int, ...] = ()
    """Numbers of the layers that stay, ascending, from 0; empty: all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = all(a < b for a, b in zip(self.keep, self.keep[1:], strict=False))
        if not rising or min(self.keep, default=0) < 0:
            raise ValueError(
                f"keep is {list(self.keep)}; name each layer that stays once, ascending, from 0"
            )

    @property
    def label(self) -> str:
        """The step in a few words."""
        return f"{self.method} {len(self.keep)} layers" if self.keep else self.method


@dataclass(frozen=True, kw_only=True)
class DistillStep(LayersStep):
    """method = "distill": the model learns what the model of the folder in says of each token
    (Hinton et al., 2015), and begins, where `keep` names layers, with these of its own alone (Sanh
    et al., 2019)."""

    temperature: float = 2.0
    """By which both models' logits are divided in the soft loss."""
    soft: float = 0.5
    """Weight of the divergence from the teacher, times the square of the temperature."""
    hard: float = 0.5
    """Weight of the cross entropy of the text."""
    hidden: float = 0.0
    """Weight of one minus the cosine of the last hidden states of both models."""

    method: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "more than 0", ("temperature",), lambda v: v > 0)
        require(self, "0 or more", ("soft", "hard", "hidden"), lambda v: v >= 0)
        if self.soft == 0:
            raise ValueError(
                "soft is 0.0, so that nothing is learnt from the teacher; give it some weight, or "
                'write method = "finetune"'
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneStep(LayersStep):
    """method = "finetune": the model learns the text of [data] train, all weights of it or an
    update of low rank (Hu et al., 2021), which is then added to them."""

    num_steps: int = 100
    """Steps of the optimizer."""
    rank: int = 0
    """0: all weights learn. More: only adapters of this rank, which are merged at the end."""
    alpha: float = 16.0
    """With `rank`, updates are scaled by alpha / rank."""
    only: tuple[str, ...] = ()
    """With `rank`, patterns of the names of layers that have adapters; empty: all linear layers but
    the head."""

    method: ClassVar[str] = "finetune"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "0 or more", ("rank",), lambda v: v >= 0)
        require(self, "more than 0", ("alpha",), lambda v: v > 0)
        if self.only and not self.rank:
            raise ValueError(
                f"only is {list(self.only)}, but rank is 0, with which all weights learn; set rank "
                "to 8, say, or leave only out"
            )

    @property
    def label(self) -> str:
        """The step in a few words."""
        return f"{super().label}, LoRA {self.rank}" if self.rank else super().label


def step_kinds() -> dict[str, type[Step]]:
    """{method: the class of its options}."""
    return {kind.method: kind for kind in (DistillStep, FinetuneStep)}


def check_order(steps: Sequence[Step]) -> None:
    """Refuse steps in an order that has no sense.

    Args:
        steps: All of them.

    Raises:
        ConfigError: There are none, or one is behind another that it can't follow.
    """
    if not steps:
        raise ConfigError(
            "there is no [[step]]; write one or more, each with a method: "
            f"{', '.join(step_kinds())}"
        )
