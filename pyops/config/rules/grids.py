"""What a run whose ranks lie on a grid (parallel.grid) does not go with."""

from __future__ import annotations

import json
from typing import Any

from pyops.config.run_sections import RunSections
from pyops.config.task_config import KINDS

__all__ = ["check_grid"]


MODELLED_BY_VIT = tuple(kind for kind, section in KINDS.items() if section == "vit")
ELEMENTWISE = ("adamw", "adam", "sgd", "lion", "adagrad")
"""Optimizers whose step of an element looks at no other element of its tensor."""


def check_grid(config: RunSections) -> None:
    """Refuse what a run on a grid does not go with: it trains a GPT on text, or a ViT on images.

    Raises:
        ValueError: An option has another value than such a run takes.
    """
    grid = config.parallel.grid
    if grid == "1d":
        return
    text = config.task.kind == "text"
    rules: list[tuple[str, Any, Any, str]] = [
        ("model.folder", config.model_folder.folder, "", "trains a GPT from its first values"),
        ("elastic.freeze", config.elastic.freeze, "none", "freezes nothing"),
        ("train.compile", config.train.compile, False, "sends blocks in the middle of a layer"),
        *(_of_text(config) if text else _of_images(config)),
    ]
    for key, value, taken, why in rules:
        if value != taken:
            raise ValueError(
                f"{key} is {json.dumps(value)}, but parallel.grid is {json.dumps(grid)}: a run on "
                f"a grid {why}; set it to {json.dumps(taken)}, or parallel.grid to 1d"
            )


def _of_text(config: RunSections) -> list[tuple[str, Any, Any, str]]:
    return [
        (
            "train.num_sample_tokens",
            config.train.num_sample_tokens,
            0,
            "keeps no keys and values of earlier tokens to write a text with",
        ),
    ]


def _of_images(config: RunSections) -> list[tuple[str, Any, Any, str]]:
    task, name = config.task, config.optimizer.name
    of_images = task.kind in MODELLED_BY_VIT
    return [
        (
            "task.kind",
            task.kind,
            task.kind if of_images else "text",
            f"trains a GPT on text, or a ViT on {' or '.join(MODELLED_BY_VIT)}",
        ),
        ("task.model", task.section, "vit", "trains a ViT, and no convolutions of other ranks"),
        ("task.pretrained", task.pretrained, "", "of images begins with its first values"),
        ("distill.teacher", config.distill.teacher, "", "of images learns from labels alone"),
        (
            "optimizer.name",
            name,
            name if name in ELEMENTWISE else "adamw",
            f"of images has parts of tensors, of which {', '.join(ELEMENTWISE)} take a step alone",
        ),
    ]
