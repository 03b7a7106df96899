"""RunText: the rows of text that a rank trains on, and those that are held out; TextData: of a
corpus.

corpus   | train ................................ | validation .... |
             global batch of step 0, 1, ...            held-out rows
rank r of the mesh's axis "dp" has rows r * share ... (r + 1) * share - 1 of each batch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from pyops.config import Config
from pyops.data import (
    Batches,
    PackedBatches,
    Tokenizer,
    packed_validation_rows,
    prepare,
    validation_rows,
)
from pyops.mesh import Mesh
from pyops.train.setup.gpt_layers import batch_of, rows_of

__all__ = ["RunText", "TextData"]


class Stream(Protocol):
    """Endless batches of this rank."""

    def next(self) -> Tensor | dict[str, Tensor]:
        """Rows of text [B, T + 1], or tokens and targets."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken."""
        ...


class RunText:
    """The batches and the held-out rows of a run. Ranks that share a model have the same rows.

    Attributes:
        batches: Of this rank.
        tokenizer: Of the text.
        num_rows: Sequences of this rank in each batch.
        described: What there is, in words.
        unit: Of losses.
        bigram_loss: Of a model that knows pairs of bytes alone; None where losses are per token.
    """

    batches: Stream
    tokenizer: Tokenizer
    num_rows: int
    described: str
    unit: str
    bigram_loss: float | None = None
    _held_out: dict[str, Tensor]

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
        return self.tokenizer.decode(tokens.tolist())


class TextData(RunText):
    """The corpus of a run."""

    unit = "nats per byte"

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
        if config.data.packing == "documents":
            self.batches = PackedBatches(self.corpus, **order, **part)
            self._held_out = packed_validation_rows(self.corpus, num_sequences=count, **part)
        else:
            self.batches = Batches(self.corpus, **order, **part)
            self._held_out = rows_of(validation_rows(self.corpus, num_sequences=count, **part))
        self.num_rows = options.batch // num_ranks
        self.tokenizer, self.bigram_loss = self.corpus.tokenizer, self.corpus.bigram_loss
        self.described = (
            f"{self.corpus.train.size:,} tokens of {self.corpus.path}; a byte-bigram model reaches "
            f"{self.bigram_loss:.3f} nats per byte"
        )
