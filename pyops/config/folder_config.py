"""ModelFolder: [model] of a run that trains a Hugging Face folder in place of a GPT."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.config.config_error import require

__all__ = ["ModelFolder"]


@dataclass(frozen=True)
class ModelFolder:
    """Which model a run trains, where it is not a GPT of its own: [model] with the key folder.

    Attributes:
        folder: That save_pretrained of transformers wrote, with a tokenizer.json; "": none.
        sequence_length: The tokens of a row, at most.
    """

    folder: str = ""
    sequence_length: int = 512

    def __post_init__(self) -> None:
        require(self, "2 or more", ("sequence_length",), lambda v: v >= 2)

    @property
    def given(self) -> bool:
        """Whether the run trains a folder."""
        return bool(self.folder)
