"""FolderData: the rows of a run that trains a folder, and those that are held out.

data.path --the folder's tokenizer--> rows | train .............. | held out
                                           | global batch 0, 1, ...
rank r of the mesh's axis "dp" has rows r * share ... (r + 1) * share - 1 of each batch
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pyops.comm.agreement import ranks_agree
from pyops.config import Config
from pyops.data.folder_text import (
    RowBatches,
    RowOptions,
    RowShare,
    held_out_batches,
    prepare_rows,
)
from pyops.mesh import Mesh
from pyops.train.pretrained.folder_model import FolderModel

__all__ = ["FolderData"]

PROMPT_TOKENS = 64  # of a held-out row of text, which a sample continues


class FolderData:
    """The rows of a run.

    Args:
        config: The run's configuration.
        model: Whose tokenizer cuts the text.
        mesh: The ranks; those that share a model have the same rows.

    Attributes:
        rows: All of them.
        batches: Those to train on, as this rank sees them.
        num_held_out: How many rows are held out, of which `validation` takes
            train.num_validation_sequences at most.

    Raises:
        CorpusError: The text can't be used, on every rank alike.
    """

    def __init__(self, config: Config, model: FolderModel, mesh: Mesh) -> None:
        options, length = config.train, config.model_folder.sequence_length
        self.rows = prepare_rows(
            config.data, model.tokenizer, RowOptions(length, config.data.long_rows)
        )
        self._share = RowShare(
            options.batch, length, model.tokenizer.pad_token_id, mesh.rank("dp"), mesh.size("dp")
        )
        with ranks_agree():
            chosen, held_out = self.rows.split(config.data.validation_fraction)
            self.batches = RowBatches(self.rows, chosen, self._share, seed=options.seed)
        self.num_held_out = len(held_out)
        count = min(options.num_validation_sequences, len(held_out))
        self._held_out = [held_out[i * len(held_out) // count] for i in range(count)]

    def validation(self) -> Iterator[dict[str, Tensor]]:
        """The held-out rows, once, spread evenly where they are many."""
        return held_out_batches(self.rows, self._held_out, self._share)

    def prompt(self) -> Tensor:
        """The beginning of the first held-out row: of instructions up to what is learnt. int64
        [1, T]"""
        row = self._held_out[0]
        length = self.rows.length(row)
        batch = self.rows.batch([row], length=length, pad_token_id=0)
        end = min(PROMPT_TOKENS, length // 2)
        if self.rows.learns is not None:
            end = int((batch["labels"][0] >= 0).nonzero()[0])
        return batch["input_ids"][:, : max(1, end)]

    def described(self) -> str:
        """How many rows there are, in words."""
        rows = self.rows
        kind = "text" if rows.learns is None else "instructions"
        text = (
            f"{len(rows) - self.num_held_out:,} rows of {kind}, of {rows.longest:,} tokens at "
            f"most, and {self.num_held_out:,} held out, of {rows.path}"
        )
        if rows.num_truncated:
            text += f"; {rows.num_truncated:,} longer ones were cut"
        if rows.num_left_out:
            text += f", of which {rows.num_left_out:,} had nothing to learn left and are not there"
        return text
