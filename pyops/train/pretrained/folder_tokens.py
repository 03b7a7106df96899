"""FolderTokens: files of tokens as the rows of a run that trains a folder.

data.paths, written with the folder's tokenizer.json --> rows of T tokens, mixed by data.weights
rank r of the mesh's axis "dp" has rows r * share ... (r + 1) * share - 1 of each batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from pyops.comm.agreement import check_same, on_all_ranks, ranks_agree
from pyops.config import Config
from pyops.data import CorpusError
from pyops.mesh import Mesh
from pyops.token_data import (
    Prefetched,
    SequenceRows,
    TokenBatches,
    Tokens,
    TokenSource,
    held_out_places,
    tokenizer_digest,
)
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.setup.token_files import open_paths

__all__ = ["FolderTokens"]

PROMPT_TOKENS = 64  # of a held-out row, which a sample continues


class LabelledRows:
    """The rows of a data set with the names that a folder's model takes.

    Args:
        tokens: Of the data set.
        sequence_length: T, the tokens of a row.
    """

    def __init__(self, tokens: Tokens, *, sequence_length: int) -> None:
        self._rows = SequenceRows(tokens, sequence_length=sequence_length)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Some rows: "input_ids" int64 [B, T], and "labels", the same.

        Args:
            rows: Their numbers.
        """
        found = self._rows.batch(rows)["tokens_BT"].contiguous()
        return {"input_ids": found, "labels": found.clone()}


class FolderTokens:
    """The rows of a run.

    Args:
        config: The run's configuration.
        model: Whose tokenizer made the tokens.
        mesh: The ranks; those that share a model have the same rows.

    Attributes:
        batches: Those to train on, as this rank sees them.

    Raises:
        CorpusError: The tokens can't be used, on every rank alike.
    """

    def __init__(self, config: Config, model: FolderModel, mesh: Mesh) -> None:
        data, options, length = config.data, config.train, config.model_folder.sequence_length
        opened = on_all_ranks(partial(_opened, config, model))
        check_same({f"data.paths {each.path}": each.digest for each in opened}, who="[data]")
        self._rank, num_ranks = mesh.rank("dp"), mesh.size("dp")
        self._batch, self._share = options.batch, options.batch // num_ranks
        with ranks_agree():
            rows = [LabelledRows(each, sequence_length=length) for each in opened]
            weights = data.weights or [float(len(each)) for each in rows]
            self._sources = [
                TokenSource(
                    own, digest=each.digest, weight=weight, held_out=data.validation_fraction
                )
                for own, each, weight in zip(rows, opened, weights, strict=True)
            ]
            batches = TokenBatches(
                self._sources,
                global_batch=options.batch,
                seed=options.seed,
                rank=self._rank,
                num_ranks=num_ranks,
            )
        self._held_out = held_out_places(self._sources, num_rows=options.num_validation_sequences)
        self.batches = Prefetched(batches, depth=data.prefetch)
        total = sum(each.num_tokens for each in opened)
        self._described = f"{total:,} tokens of {', '.join(data.paths)}"

    def validation(self) -> Iterator[dict[str, Tensor]]:
        """The held-out rows, once; copies of the model have equally many batches, of which the last
        may have no rows."""
        for begin in range(0, len(self._held_out), self._batch):
            first = begin + self._rank * self._share
            last = min(first + self._share, begin + self._batch)
            for i, source in enumerate(self._sources):
                yield source.rows.batch([row for of, row in self._held_out[first:last] if of == i])

    def prompt(self) -> Tensor:
        """The beginning of the first held-out row: int64 [1, T]."""
        source, row = self._held_out[0]
        found = self._sources[source].rows.batch([row])["input_ids"]
        return found[:, : max(1, min(PROMPT_TOKENS, found.shape[1] // 2))]

    def described(self) -> str:
        """What there is, in words."""
        return self._described


def _opened(config: Config, model: FolderModel) -> list[Tokens]:
    """The files, whose tokens are those of the folder's tokenizer."""
    file = Path(model.folder) / "tokenizer.json"
    own = tokenizer_digest(file.read_text(encoding="utf-8"))
    found = open_paths(config.data.paths, model.tokenizer.vocab_size)
    for each in found:
        if each.tokenizer and each.tokenizer != own:
            raise CorpusError(
                f"{each.path} has tokens of another tokenizer ({each.tokenizer}) than {file} "
                f"({own}); write it anew: pyops data SOURCE... --tokenizer {model.folder}"
            )
    return found
