"""The steps of a compression, each a frozen dataclass that a table [[step]] of the TOML file fills,
and the orders in which they have a sense.

    distill -> prune -> finetune -> quantize       any of them may be left out, or repeated
                                    '------> nothing follows: codes of few bits do not learn
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from pyops.config.config_error import ConfigError, require

__all__ = [
    "DistillStep",
    "FinetuneStep",
    "LayersStep",
    "PruneStep",
    "QuantizeStep",
    "Step",
    "check_order",
    "step_kinds",
]


HOW = ("gradual", "once")
SCOPES = ("layer", "global")
PATTERN = re.compile(r"[1-9]\d?:[1-9]\d?")
WEIGHTS = ("int8", "int4")
ACTIVATIONS = ("", "token", "tensor")
ALGORITHMS = ("nearest", "smooth", "awq", "gptq")


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
        rising = all(a < b for a, b in pairwise(self.keep))
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


@dataclass(frozen=True, kw_only=True)
class PruneStep(Step):
    """method = "prune": the smallest weights become 0 and stay so, also in the steps that follow;
    the others learn on, by the text of [data] train."""

    num_steps: int = 200
    """Steps of the optimizer; 0: weights are pruned at once, and nothing is learnt."""
    sparsity: float = 0.0
    """The share that goes, of all linear layers but the head; or give `pattern`."""
    pattern: str = ""
    """"2:4", say: two of each four consecutive inputs stay."""
    how: str = "gradual"
    """"gradual": over the first two thirds of the steps the sparsity grows by the cubic schedule of
    Zhu and Gupta (2017); with `pattern`, masks are chosen anew in each step (SR-STE, Zhou et al.,
    2021). "once": all at the beginning, then the steps with masks that stay."""
    scope: str = "layer"
    """Of what the smallest weights go: "layer", of each by itself, or "global", of all together."""
    least: float = 0.0
    """With "global", the share of each layer that stays in any case."""
    permute: bool = False
    """With "2:4", whether channels are permuted first, which leaves the function as it is, so that
    more is kept."""
    only: tuple[str, ...] = ()
    """Patterns of names of parameters; empty: all matrices but embeddings and the head."""

    method: ClassVar[str] = "prune"
    least_steps: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "0 or more, less than 1", ("sparsity", "least"), lambda v: 0.0 <= v < 1.0)
        require(self, f"one of {', '.join(HOW)}", ("how",), lambda v: v in HOW)
        require(self, f"one of {', '.join(SCOPES)}", ("scope",), lambda v: v in SCOPES)
        if bool(self.sparsity) == bool(self.pattern):
            raise ValueError(
                f"sparsity is {self.sparsity:g} and pattern {self.pattern!r}; give one of them: a "
                'share that goes, such as 0.8, or a pattern, such as "2:4"'
            )
        if self.pattern and not PATTERN.fullmatch(self.pattern):
            raise ValueError(f'pattern is {self.pattern!r}; write n of m inputs, such as "2:4"')
        if self.pattern and self.scope != "layer":
            raise ValueError(f"scope is {self.scope!r}, which pattern has no use for; leave it out")
        if self.permute and self.pattern != "2:4":
            raise ValueError(f'permute is true, but pattern is {self.pattern!r}; it is for "2:4"')
        if self.least > 1.0 - self.sparsity:
            raise ValueError(
                f"least is {self.least:g}, but a sparsity of {self.sparsity:g} leaves "
                f"{1.0 - self.sparsity:.4g} of all weights; give a least of that or less"
            )
        if self.least and self.scope != "global":
            raise ValueError(
                f'least is {self.least:g}, but scope is {self.scope!r}; it is for "global"'
            )

    @property
    def label(self) -> str:
        """The step in a few words."""
        what = self.pattern or f"{self.sparsity:.4g}"
        return f"prune {what}, at once" if not self.num_steps else f"prune {what}, {self.how}"


@dataclass(frozen=True, kw_only=True)
class QuantizeStep(Step):
    """method = "quantize": the linear layers but the head compute with weights of few bits. It is
    the last step."""

    num_steps: int = 0
    """0: after training. More: the model learns so many steps with the rounding in mind, straight
    through it (Bengio et al., 2013)."""
    lr: float = 1e-4
    """The highest learning rate."""
    weights: str = "int8"
    """"int8", with a scale for each output, or "int4", with one for each `group` of inputs."""
    group: int = 32
    """Of "int4": inputs that share a scale; 0: all of an output."""
    activations: str = ""
    """"": they stay as they are. "token": 8 bits, with a scale for each token, found when it comes.
    "tensor": 8 bits, with one scale for each layer, found on the calibration rows."""
    algorithm: str = "nearest"
    """How weights are rounded: "nearest"; with calibration rows "smooth" (Xiao et al., 2022), "awq"
    (Lin et al., 2023) or "gptq" (Frantar et al., 2022)."""
    only: tuple[str, ...] = ()
    """Patterns of names of layers; empty: all linear layers but the head."""

    method: ClassVar[str] = "quantize"
    least_steps: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("weights", WEIGHTS),
            ("activations", ACTIVATIONS),
            ("algorithm", ALGORITHMS),
        ):
            shown = ", ".join(f'"{each}"' for each in known)
            require(self, f"one of {shown}", (name,), lambda v, known=known: v in known)
        require(self, "0, or an even number", ("group",), lambda v: v >= 0 and v % 2 == 0)
        if self.activations and self.weights == "int4":
            raise ValueError(
                f'activations is "{self.activations}", but weights is "int4", whose products take '
                'activations as they are; set weights to "int8", or leave activations out'
            )
        if self.num_steps and self.algorithm != "nearest":
            raise ValueError(
                f'algorithm is "{self.algorithm}", but num_steps is {self.num_steps}: what learns '
                "with the rounding in mind is rounded to nearest; leave one of them out"
            )

    @property
    def calibrates(self) -> bool:
        """Whether the step looks at what the layers are given."""
        return self.algorithm != "nearest" or (self.activations == "tensor" and not self.num_steps)

    @property
    def label(self) -> str:
        """The step in a few words."""
        what = self.weights + (f" x int8 a {self.activations}" if self.activations else "")
        how = "aware" if self.num_steps else self.algorithm
        return f"quantize {what}, {how}"


KINDS: tuple[type[Step], ...] = (DistillStep, FinetuneStep, PruneStep, QuantizeStep)


def step_kinds() -> dict[str, type[Step]]:
    """{method: the class of its options}."""
    return {kind.method: kind for kind in KINDS}


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
    for number, (before, step) in enumerate(pairwise(steps), start=1):
        if isinstance(before, QuantizeStep):
            fix = (
                "prune first"
                if isinstance(step, PruneStep)
                else "let the model learn before, or with num_steps of the quantization itself"
            )
            raise ConfigError(
                f"step {number + 1} ({step.method}) follows step {number} (quantize), whose codes "
                f"of few bits nothing changes any more; {fix}"
            )
    pruned: tuple[int, PruneStep] | None = None
    for number, step in enumerate(steps, start=1):
        if pruned is not None:
            _check_behind_pruning(number, step, *pruned)
        if isinstance(step, PruneStep):
            pruned = number, step


def _check_behind_pruning(number: int, step: Step, at: int, pruned: PruneStep) -> None:
    """Refuse what would not leave 0 what is pruned."""
    why = ""
    if isinstance(step, LayersStep) and step.keep:
        why = f"keep is {list(step.keep)}: masks are of layers that are there; choose layers first"
    elif isinstance(step, FinetuneStep) and step.rank:
        why = f"rank is {step.rank}: adapters would fill the pruned weights; set rank to 0"
    elif isinstance(step, QuantizeStep) and step.algorithm == "gptq":
        why = (
            'algorithm is "gptq", which moves pruned weights, too; take "nearest", "smooth" or '
            '"awq"'
        )
    elif isinstance(step, PruneStep):
        why = _why_not_more(step, pruned)
    if why:
        raise ConfigError(f"step {number} ({step.method}) follows step {at} (prune), and {why}")


def _why_not_more(step: PruneStep, pruned: PruneStep) -> str:
    """Why some of what one step has pruned would come back in another; "": nothing would."""
    for name in ("pattern", "scope", "only", "least"):
        ours, theirs = getattr(step, name), getattr(pruned, name)
        if ours != theirs or (name == "pattern" and ours):
            return (
                f"{name} is {ours!r}, there {theirs!r}, so that some of what is pruned would come "
                "back; prune by a larger sparsity and the same other options, or once"
            )
    if step.sparsity <= pruned.sparsity:
        return (
            f"sparsity is {step.sparsity:g}, there {pruned.sparsity:g}; give a larger one, or "
            "leave the step out"
        )
    return ""
