"""TextData: the rows of text that a rank trains on, and those that are held out.

corpus   | train ................................ | validation .... |
             global batch of step 0, 1, ...            held-out rows
rank r of the mesh's axis "dp" has rows r * share ... (r + 1) * share - 1 of each batch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyops.config import Config
from pyops.data import Batches, prepare, validation_rows
from pyops.mesh import Mesh
from pyops.train.setup.gpt_layers import batch_of

__all__ = ["TextData"]


class TextData:
    """The corpus, its batches and the held-out rows of a run.

    Ranks that share a model have the same rows.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Prepare the corpus, and find this rank's part of it.

        Raises:
            CorpusError: The text can't be used, on every rank alike.
        """
        model, options = config.model, config.train
        num_ranks = mesh.size("dp")
        self.corpus = prepare(
            config.data, vocab_size=model.vocab_size, sequence_length=model.sequence_length
        )
        self.batches = Batches(
            self.corpus,
            sequence_length=model.sequence_length,
            global_batch=options.batch,
            seed=options.seed,
            rank=mesh.rank("dp"),
            num_ranks=num_ranks,
        )
        self.held_out_BT = validation_rows(
            self.corpus,
            sequence_length=model.sequence_length,
            num_sequences=options.num_validation_sequences,
            rank=mesh.rank("dp"),
            num_ranks=num_ranks,
        )
        self.num_rows = options.batch // num_ranks
        """Sequences of this rank in each batch."""

    def next(self, device: torch.device) -> dict[str, Any]:
        """This rank's next batch, as `batch_of` has it."""
        return batch_of(self.batches.next().to(device))

    def validation(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """The rows held out, once, some at a time: at least one batch, which may have none."""
        for rows_BT in self.held_out_BT.split(self.num_rows):
            yield batch_of(rows_BT.to(device))

    def decode(self, tokens: Tensor) -> str:
        """The text of these tokens."""
        return self.corpus.tokenizer.decode(tokens.tolist())
