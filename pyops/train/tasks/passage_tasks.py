"""PassagesTask and MaskedTask: what there is to learn of passages of the standard library."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks
from pyops.data import DataConfig, prepare_passages
from pyops.data.passages import FAMILIES, mask_rows
from pyops.models import BERT, BERTClassifier, BERTConfig
from pyops.models.vocabulary_head import IGNORED
from pyops.train.tasks.task import NatsTask, Task

__all__ = ["MaskedTask", "PassagesTask"]


class PassagesTask(Task):
    """Which family of modules of the standard library the passage is from: copies of each are
    trained on, as of images."""

    name = "passages"

    def __init__(
        self,
        config: BERTConfig,
        data: DataConfig,
        *,
        each: int,
        count: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._config = config
        passages = prepare_passages(
            data, vocab_size=config.vocab_size, length=config.sequence_length, group=group
        )
        self.digest = passages.digest
        self._parts = (passages.train.fewer(each).copied(count), passages.held_out)
        self._labels = tuple(part.labels for part in self._parts)
        self.samples, self.held_out = (len(part) for part in self._parts)
        self.block_count, self.tokens = config.num_layers, config.sequence_length

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        return BERTClassifier(
            self._config,
            num_labels=len(FAMILIES),
            context=context,
            seed=seed,
            device=device,
            dtype=dtype,
        )

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        return self._parts[held_out].cut(rows), self._labels[held_out][rows]


class MaskedTask(NatsTask):
    """Masked tokens of the standard library; at the first place, instead of BERT's next sentence,
    which file the row is from.

    As in BERT the loss is the mean of each of the two, added: a row's file counts as much as all
    its masked tokens. Of what is held out, masked tokens alone are scored, always the same ones.
    """

    name = "masked_text"

    def __init__(
        self,
        config: BERTConfig,
        data: DataConfig,
        *,
        count: int,
        seed: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._config, self._seed = config, seed
        self._passages = prepare_passages(
            data, vocab_size=config.vocab_size, length=config.sequence_length, group=group
        )
        self.digest = self._passages.digest
        self._parts = (self._passages.text.copied(count), self._passages.held_out)
        self._files = self._parts[False].files
        self.samples, self.held_out = (len(part) for part in self._parts)
        self.block_count, self.tokens = config.num_layers, config.sequence_length
        row, first = torch.zeros(1, self.tokens, device="cpu"), torch.zeros(1, device="cpu")
        self.terms = self.held_out_terms = int(
            mask_rows(row, passages=self._passages, samples=first, seed=0, epoch=0)[1].sum()
        )

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        return BERT(self._config, context=context, seed=seed, device=device, dtype=dtype)

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        tokens = self._parts[held_out].cut(rows)
        seed, epoch = (0, -1) if held_out else (self._seed, epoch)
        given, masked = mask_rows(
            tokens, passages=self._passages, samples=rows, seed=seed, epoch=epoch
        )
        target = torch.where(masked, tokens, IGNORED)
        if not held_out:
            target[:, 0] = self._files[rows]
        return given, target

    def _named(self, target: Tensor, held_out: bool) -> dict[str, Any]:
        return {
            "targets_BT": target,
            "reduction": "none",
        }  # a sum could not tell the file from the tokens

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._has_first:  # of a row, and of this rank's tokens, side by side
            return output[:, 0].sum() * self.terms + output[:, 1:].sum()
        return output.sum()

    def augmentation(self, epoch: int) -> int:
        return epoch + 1
