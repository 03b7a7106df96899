"""ModelFolder: [model] of a run that trains a Hugging Face folder in place of a GPT; and
AdapterConfig: [adapter], what such a run trains in the place of the folder's own parameters."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.config.config_error import require

__all__ = ["AdapterConfig", "ModelFolder"]


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


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA (Hu et al., arXiv:2106.09685): the folder's parameters stay as they are, and an update
    of low rank of its linear layers is trained, by PEFT.

    Attributes:
        rank: r, the rows of A and the columns of B; 0: the folder's own parameters are trained.
        alpha: The update is scaled by alpha / r.
        dropout: Probability with which elements of a layer's input are dropped for the adapter.
        layers: Names of linear layers, such as ["q_proj", "v_proj"]; []: all but the head.
    """

    rank: int = 0
    alpha: int = 16
    dropout: float = 0.0
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self, "0 or more", ("rank",), lambda v: v >= 0)
        require(self, "above 0", ("alpha",), lambda v: v > 0)
        require(self, "0 or more and less than 1", ("dropout",), lambda v: 0 <= v < 1)
        if not self.rank and (self.alpha, self.dropout, self.layers) != (16, 0.0, ()):
            raise ValueError(
                "rank is 0, which trains no adapter, but other options of it are set; give a rank, "
                "such as 8, or leave them out"
            )
