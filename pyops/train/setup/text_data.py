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
from pyops.data import (
    Batches,
    PackedBatches,
    packed_validation_rows,
    prepare,
    validation_rows,
)
from pyops.mesh import Mesh
from pyops.train.setup.gpt_layers import batch_of, rows_of

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
        part: dict[str, Any] = {
            "sequence_length": model.sequence_length,
            "rank": mesh.rank("dp"),
            "num_ranks": num_ranks,
        }
        order = {"global_batch": options.batch, "seed": options.seed}
        count = options.num_validation_sequences
        self.batches: Batches | PackedBatches
        if config.data.packing == "documents":
            self.batches = PackedBatches(self.corpus, **order, **part)
            self._held_out = packed_validation_rows(self.corpus, num_sequences=count, **part)
        else:
            self.batches = Batches(self.corpus, **order, **part)
            self._held_out = rows_of(validation_rows(self.corpus, num_sequences=count, **part))
        self.num_rows = options.batch // num_ranks
        """Sequences of this rank in each batch."""

    def next(self, device: torch.device) -> dict[str, Any]:
        """This rank's next batch, as `batch_of` has it."""
        found = self.batches.next()
        return batch_of(found if isinstance(found, dict) else rows_of(found), device)

    def validation(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """The rows held out, once, some at a time: at least one batch, which may have none."""
        parts = {name: rows.split(self.num_rows) for name, rows in self._held_out.items()}
        for several in zip(*parts.values(), strict=True):
            yield batch_of(dict(zip(parts, several, strict=True)), device)

    def prompt(self, num_tokens: int) -> Tensor:
        """The beginning of the first row held out, or of its first document: int64 [n], n at most
        `num_tokens`."""
        documents_BT = self._held_out.get("documents_BT")
        if documents_BT is not None:
            num_tokens = min(num_tokens, int((documents_BT[0] == 0).sum()))
        return self._held_out["tokens_BT"][0, :num_tokens]

    def decode(self, tokens: Tensor) -> str:
        """The text of these tokens."""
        return self.corpus.tokenizer.decode(tokens.tolist())
