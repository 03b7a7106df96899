"""A rank's columns of the vocabulary, and the statistics of whole rows from those of each rank's
part, in one collective.

    rank 0   words 0 1 2       (m_0, sum of exp(z - m_0), target's logit or 0)  --.
    rank 1   words 3 4 5       (m_1, ...)                                       --+-- gather
    rank 2   word  6, padding  (m_2, ...)                                       --'

    m = max of m_r,  sum = sum over r of sum_r exp(m_r - m)

12 bytes a token go round (16 with label smoothing, twice that in float64), and as many once more,
which say what each rank holds and was asked: the first column, their number, and a check sum of
targets and options. Every rank merges the same numbers in the same order, so all have the same
bits.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.comm.failure import DisagreementError
from pyops.ops.layers.cross_entropy import cross_entropy_statistics
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["CrossEntropyConfig", "RowOptions", "VocabularyPart", "merge_statistics"]


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig:
    """Options of a cross entropy whose vocabulary is cut over ranks; the same on every rank but for
    `first_column`."""

    ignore_index: int = -100
    """A target that does not count."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution over the vocabulary that is mixed into each target."""
    z_loss: float = 0.0
    """Weight of the square of log(sum exp logits), which is added to each row's loss (PaLM;
    Chowdhery et al., 2022, section 5)."""
    vocab_size: int | None = None
    """Number of words of the whole vocabulary; None: the ranks' columns together."""
    first_column: int | None = None
    """The first word of this rank's columns, where ranks have different numbers of columns; give
    `vocab_size` as well. None: every rank has as many columns, one rank's after the other's."""

    def row_options(self) -> RowOptions:
        """What the loss of a row depends on beside its logits and target."""
        return RowOptions(self.ignore_index, self.label_smoothing, self.z_loss)


class RowOptions(NamedTuple):
    """What the loss of a row depends on beside its logits and target."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's columns [0, columns) are words first_column, first_column + 1, ... of vocab_size;
    the columns behind them are padding."""

    ranks: Ranks
    first_column: int
    columns: int
    vocab_size: int

    @classmethod
    def of(
        cls, width: int, ranks: Ranks, *, vocab_size: int | None, first_column: int | None
    ) -> VocabularyPart:
        """This rank's part of the vocabulary, of `width` columns; see `CrossEntropyConfig`.

        Raises:
            ValueError: `width` columns on each rank do not hold the vocabulary, or `first_column`
                is given without `vocab_size`.
        """
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}; it must be 1 or more")
        if first_column is None:
            words = width * ranks.size if vocab_size is None else vocab_size
            if words > width * ranks.size:
                raise ValueError(
                    f"{width} columns on each of {ranks.size} ranks don't hold a "
                    f"vocabulary of {words}; where ranks have "
                    "different numbers of columns, give each its first_column"
                )
            start = min(ranks.rank * width, words)
            return cls(ranks, start, min(width, words - start), words)
        if vocab_size is None:
            raise ValueError(
                f"first_column is {first_column} and vocab_size is None; give the number of words "
                "of the whole vocabulary as vocab_size"
            )
        if not 0 <= first_column <= vocab_size:
            raise ValueError(
                f"first_column is {first_column}; it must be from 0 to vocab_size = {vocab_size}"
            )
        return cls(ranks, first_column, min(width, vocab_size - first_column), vocab_size)

    def statistics(self, logits: Tensor, targets: Tensor, options: RowOptions) -> Tensor:
        """The statistics of whole rows, as `cross_entropy_statistics` gives them for a whole
        vocabulary.

        Args:
            logits: [N, C], this rank's columns.
            targets: [N] int64, the same on every rank.
            options: see `RowOptions`.

        Returns:
            [N, 3], or [N, 4] with label smoothing, fp32 (fp64 for fp64 logits).

        Raises:
            DisagreementError: on every rank, where the ranks' parts do not make up the vocabulary,
                or their targets or options differ. Only for CPU tensors: nothing waits for a CUDA
                device.
        """
        with_sum = options.label_smoothing > 0

        def local(out: Tensor | None) -> Tensor:
            return cross_entropy_statistics(
                logits,
                targets,
                ignore_index=options.ignore_index,
                first_column=self.first_column,
                columns=self.columns,
                with_sum=with_sum,
                out=out,
            )

        if self.ranks.size == 1:
            return local(None)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        own = logits.new_zeros(len(logits) + 1, 4 if with_sum else 3, dtype=wide)
        local(own[:-1])
        parts = self.gather(own, targets, options)
        return merge_statistics(parts[:, :-1], parts[:, -1, 1])

    def gather(self, own: Tensor, targets: Tensor, asked: tuple[object, ...]) -> Tensor:
        """The statistics of every rank's part, in one collective, which also tells that all
        compute one loss.

        Args:
            own: [N + 1, K], K of 3 or more: this rank's, and a last row that is overwritten.
            targets: [N] int64, the same on every rank.
            asked: the options of the loss, the same on every rank.

        Returns:
            [ranks, N + 1, K]; the last row of a rank begins with its first column and number of
            columns.

        Raises:
            DisagreementError: as `statistics`.
        """
        own[-1, 0] = self.first_column
        own[-1, 1] = self.columns
        if not own.is_cuda:
            own[-1, 2] = self._check_sum(targets, asked)
        parts = self.ranks.gather(own).wait().view(self.ranks.size, *own.shape)
        if not own.is_cuda:
            self._agree(parts[:, -1])
        return parts

    def _check_sum(self, targets: Tensor, asked: tuple[object, ...]) -> int:
        """24 bits, which a float32 holds exactly."""
        begin = zlib.crc32(repr((asked, self.vocab_size)).encode())
        return zlib.crc32(targets.contiguous().view(torch.uint8).numpy().data, begin) >> 8

    def _agree(self, notes: Tensor) -> None:
        """DisagreementError unless the ranks compute one loss; notes [ranks, 3 or more]: first
        column, number of columns, check sum of targets and options."""
        table = [[int(number) for number in row[:3]] for row in notes.tolist()]
        begins = 0
        for rank, (first, columns, check) in enumerate(table):
            if first != begins:
                parts = ", ".join(f"rank {r}: {a} to {a + n}" for r, (a, n, _) in enumerate(table))
                raise DisagreementError(
                    "the ranks' columns do not follow one another in a vocabulary of "
                    f"{self.vocab_size} ({parts})",
                    ranks=[rank],
                )
            begins += columns
            if check != table[0][2]:
                raise DisagreementError(
                    f"rank {rank} computes another loss than rank 0: other targets, "
                    "vocab_size, ignore_index, label_smoothing, z_loss or other options; the ranks "
                    "of a group must be given the same",
                    ranks=[rank],
                )
        if begins != self.vocab_size:
            raise DisagreementError(
                f"the ranks' columns end at {begins}, the vocabulary at {self.vocab_size}",
                ranks=list(range(len(table))),
            )


def merge_statistics(parts: Tensor, columns: Tensor | None = None) -> Tensor:
    """Statistics of whole rows.

    Args:
        parts: [ranks, N, 3 or 4], those of each rank's columns.
        columns: [ranks], how many each has; read only with the fourth number.
    """
    maximum = parts[:, :, 0].amax(0)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    lower = parts[:, :, 0] - shift  # of each part's maximum; -inf where it has none
    merged = [maximum, (parts[:, :, 1] * lower.exp()).sum(0), parts[:, :, 2].sum(0)]
    if parts.shape[2] == 4:
        assert columns is not None
        none = (columns == 0)[:, None]
        merged.append((parts[:, :, 3] + (columns[:, None] * lower).masked_fill(none, 0.0)).sum(0))
    return torch.stack(merged, dim=1)
