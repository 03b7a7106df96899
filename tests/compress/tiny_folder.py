"""A folder of a tiny GPT that has learnt a text, as the example makes them, and a run over it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from pyops import hub
from pyops.compress import CompressConfig, compress_config_of
from pyops.models import GPT, GPTConfig
from tests.workers import ROOT

pytest.importorskip("tokenizers")

__all__ = ["LENGTH", "make_folder", "model_of", "run_of"]

SENTENCE = "to be or not to be, that is the question: 1 + 2 = 3.\n"
LENGTH = 32  # tokens of a row


def make_folder(folder: Path, **changes: Any) -> Path:
    """The folder; beside it train.txt and held_out.txt.

    Args:
        folder: Where it is written.
        changes: Fields of the model that are to be others.
    """
    made = runpy.run_path(str(ROOT / "examples" / "compress" / "make_folder.py"))
    shape = {"num_layers": 4, "num_heads": 2, "dim": 32, "activation": "gelu_tanh", **changes}
    config = GPTConfig(vocab_size=257, sequence_length=2 * LENGTH, **shape)
    held_out = "is that not the question? " + SENTENCE * 4
    made["make_folder"](folder, SENTENCE * 40, held_out, config, num_steps=40, batch=4, lr=1e-2)
    return folder


def run_of(folder: Path, output: str, *steps: dict[str, Any], **sections: Any) -> CompressConfig:
    """A run over the folder.

    Args:
        folder: As `make_folder` left it.
        output: The name of the folder out, beside it.
        steps: Tables.
        sections: Further keys of sections.
    """
    place = folder.parent
    data = {
        "train": str(place / "train.txt"),
        "held_out": str(place / "held_out.txt"),
        "sequence_length": LENGTH,
        "cache": str(place / "cache"),
    }
    measure = {"rounds": 0, "picture": False, "new_tokens": 4}
    return compress_config_of(
        {
            "model": {
                "folder": str(folder),
                "output": str(place / output),
                **sections.get("model", {}),
            },
            "data": {**data, **sections.get("data", {})},
            "measure": {**measure, **sections.get("measure", {})},
            "step": list(steps),
        }
    )


def model_of(folder: Path | str) -> GPT:
    """The model of a folder."""
    found = hub.load(folder)
    assert isinstance(found, GPT)
    return found
