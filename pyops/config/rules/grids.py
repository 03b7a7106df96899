"""What a run whose ranks lie on a grid (parallel.grid) does not go with."""

from __future__ import annotations

import json
from typing import Any

from pyops.config.run_sections import RunSections

__all__ = ["check_grid"]


def check_grid(config: RunSections) -> None:
    """Refuse what a run on a grid does not go with.

    Raises:
        ValueError: An option has another value than such a run takes.
    """
    grid = config.parallel.grid
    if grid == "1d":
        return
    rules: list[tuple[str, Any, Any, str]] = [
        ("task.kind", config.task.kind, "text", "trains a GPT from its first values"),
        ("model.folder", config.model_folder.folder, "", "trains a GPT from its first values"),
        ("elastic.freeze", config.elastic.freeze, "none", "freezes nothing"),
        ("train.compile", config.train.compile, False, "sends blocks in the middle of a layer"),
        (
            "train.num_sample_tokens",
            config.train.num_sample_tokens,
            0,
            "keeps no keys and values of earlier tokens to write a text with",
        ),
    ]
    for key, value, taken, why in rules:
        if value != taken:
            raise ValueError(
                f"{key} is {json.dumps(value)}, but parallel.grid is {json.dumps(grid)}: a run on "
                f"a grid {why}; set it to {json.dumps(taken)}, or parallel.grid to 1d"
            )
