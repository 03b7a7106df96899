"""TextData: the rows of text that a rank trains on, and those that are held out.

corpus   | train ................................ | validation .... |
             global batch of step 0, 1, ...            held-out rows
rank r of the mesh's axis "dp" has rows r * share ... (r + 1) * share - 1 of each batch
"""

from __future__ import annotations

from torch import Tensor

from pyops.config import Config
from pyops.data import Batches, prepare, validation_rows
from pyops.mesh import Mesh

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
        self.num_microbatches = config.parallel.cut(self.num_rows, micro_batch=options.micro_batch)
        self.microbatch_rows = self.num_rows // self.num_microbatches
        """Sequences that go through the model at once."""

    def num_bytes(self, rows_BT: Tensor) -> int:
        """Bytes of text that the targets of these rows [B, T + 1] stand for."""
        return int(self.corpus.tokenizer.token_bytes(rows_BT[:, 1:].numpy()))

    def decode(self, tokens: Tensor) -> str:
        """The text of these tokens."""
        return self.corpus.tokenizer.decode(tokens.tolist())
