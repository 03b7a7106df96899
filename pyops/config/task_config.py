"""TaskConfig: what a run learns from numbered samples, and which of the other sections that needs
to be how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyops.config.config_error import require
from pyops.data import DataConfig
from pyops.data.characters import CHARACTERS
from pyops.models import BERTConfig, CoAtNetConfig, ViTConfig

__all__ = ["KINDS", "TaskConfig", "check_task"]

# kind: the section of its model
KINDS = {
    "text": "model",
    "digits": "vit",
    "characters": "vit",
    "passages": "bert",
    "masked_text": "bert",
}
SIZES = {"vit": {"image_size": 8, "num_channels": 1}, "coatnet": {"num_channels": 1}}
MODELS = {"vit": ("", "vit", "coatnet")}  # of tasks that have a choice; the first is the usual one
LABELS = {"digits": 10, "characters": len(CHARACTERS)}


@dataclass(frozen=True)
class TaskConfig:
    """What is learnt, over how many epochs, and where weights come from.

    Attributes:
        kind: "text", next tokens of [data] by the GPT of [model]; "digits", scikit-learn's images
            of digits by [vit], and before that "characters", printed letters and digits of
            matplotlib's fonts; "passages", which family of modules of the Python standard library a
            passage is from, by [bert], and before that "masked_text", masked tokens of the library
            and the file that each row is from. [data] validation_fraction is held out: of passages,
            each file's end.
        model: Of images: "vit", the usual one, or "coatnet", by the section [coatnet], whose
            image_size the images of 8 x 8 pixels are enlarged to; "" of every other task.
        pretrained: The folder of a run whose weights to begin with, all but the head's; "": none.
        num_epochs: 0: train.num_steps steps, of the batch at the start, which may end in the middle
            of an epoch.
        num_copies: Of each image in an epoch: itself, and others that are turned, scaled and
            shifted a little, each its own way; of each passage or row of text: itself, and others
            that begin a part of its length later, so that they overlap.
        num_passages: Of each family to train on, spread over its files, before they are copied; 0:
            all there are.
    """

    kind: str = "text"
    model: str = ""
    pretrained: str = ""
    num_epochs: int = 0
    num_copies: int = 1
    num_passages: int = 0

    def __post_init__(self) -> None:
        require(self, f"one of {', '.join(KINDS)}", ("kind",), lambda v: v in KINDS)
        require(self, "0 or more", ("num_epochs", "num_passages"), lambda v: v >= 0)
        require(self, "1 or more", ("num_copies",), lambda v: v >= 1)
        known = MODELS.get(KINDS[self.kind], ("",))
        shown = ", ".join(f'"{name}"' for name in known)
        require(self, f"{shown}, as kind is {self.kind!r}", ("model",), lambda v: v in known)

    @property
    def section(self) -> str:
        """The section of the model that is trained."""
        return self.model or KINDS[self.kind]


def check_task(
    task: TaskConfig,
    *,
    data: DataConfig,
    vit: ViTConfig,
    coatnet: CoAtNetConfig,
    bert: BERTConfig,
) -> None:
    """ValueError where the sections don't fit the task."""
    section = task.section
    if task.kind == "text" and task.num_copies > 1:
        raise ValueError(
            f"task.num_copies is {task.num_copies}, but task.kind is {task.kind!r}, which has no "
            "copies: set it to 1"
        )
    if section == "bert" and task.num_copies >= bert.sequence_length:
        raise ValueError(
            f"task.num_copies is {task.num_copies}, but bert.sequence_length is "
            f"{bert.sequence_length}: a passage can begin at "
            f"{bert.sequence_length - 1} places before the next; set it to that or less"
        )
    if section in SIZES:
        images: Any = vit if section == "vit" else coatnet
        for name, wanted in {**SIZES[section], "num_labels": LABELS[task.kind]}.items():
            if (value := getattr(images, name)) != wanted:
                raise ValueError(
                    f"{section}.{name} is {value}, but task.kind is {task.kind!r}: set it to "
                    f"{wanted}"
                )
    if section == "bert":
        wants: dict[str, Any] = {"tied_head": False, "pooled_head": False}
        if task.kind == "passages":
            wants = {}
        for name, wanted in wants.items():
            if getattr(bert, name) != wanted:
                raise ValueError(
                    f"bert.{name} is true, but task.kind is {task.kind!r}: set it to false"
                )
        if data.path != "stdlib":
            raise ValueError(
                f'data.path is {data.path!r}, but task.kind is {task.kind!r}: set it to "stdlib"'
            )
        if bert.vocab_size < 258:
            raise ValueError(
                f"bert.vocab_size is {bert.vocab_size}; 256 bytes and 2 special tokens "
                "need 258 or more"
            )
