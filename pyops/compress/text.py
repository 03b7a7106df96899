"""Texts: the rows that steps learn from, that layers are calibrated on, and that are held out.

train      rows .................. | held out, where no file is named for it
           the first ones calibrate
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.agreement import ranks_agree
from pyops.compress.settings import CompressConfig, CompressData
from pyops.compress.steps import Step
from pyops.data import DataConfig
from pyops.data.folder_text import (
    FolderTokenizer,
    RowBatches,
    RowOptions,
    RowShare,
    TokenRows,
    held_out_batches,
    prepare_rows,
)

__all__ = ["Batch", "Texts"]

Batch = tuple[Tensor, Tensor]
"""Tokens [B, T], and the token that follows each, -100 where it does not count: both int64."""


@dataclass(frozen=True)
class Texts:
    """The rows of a run, the same on every rank.

    Attributes:
        config: [data].
        held_out_rows: What models are scored on.
        held_out: Which of its rows.
        train_rows: What steps learn from; None where there is none.
        train: Which of its rows.
        pad_token_id: What shorter rows are filled with.
        device: Where batches are.
    """

    config: CompressData
    held_out_rows: TokenRows
    held_out: Sequence[int]
    train_rows: TokenRows | None
    train: Sequence[int]
    pad_token_id: int
    device: torch.device

    @classmethod
    def prepare(
        cls, config: CompressConfig, tokenizer: FolderTokenizer, device: torch.device
    ) -> Texts:
        """Cut the text into tokens and open it. A collective of all ranks.

        Args:
            config: Of the run; its steps have as many rows as they need.
            tokenizer: Of the folder in.
            device: Where batches are.

        Raises:
            CorpusError: On every rank alike, for text that can't be used, or too little of it.
        """
        data = config.data
        options = RowOptions(data.sequence_length, data.long_rows)
        train = held = None
        if data.train:
            train = prepare_rows(DataConfig(data.train, cache=data.cache), tokenizer, options)
        if data.held_out:
            held = prepare_rows(
                DataConfig(data.held_out, cache=data.cache),
                tokenizer,
                RowOptions(data.sequence_length, data.long_rows, keeps_rest=True),
            )
        with ranks_agree():
            chosen: Sequence[int] = range(len(train)) if train is not None else ()
            if held is None:
                assert train is not None
                held = train
                chosen, scored = train.split(data.validation_fraction)
            else:
                scored = list(range(len(held)))
            texts = cls(
                data,
                held,
                scored[: data.num_held_out_rows],
                train,
                chosen,
                tokenizer.pad_token_id,
                device,
            )
            for step in config.steps:
                if step.learns:
                    texts._batches(step)
        return texts

    def _batches(self, step: Step) -> RowBatches:
        assert self.train_rows is not None
        share = RowShare(step.batch, self.config.sequence_length, self.pad_token_id)
        return RowBatches(self.train_rows, self.train, share, seed=step.seed)

    def to_learn(self, step: Step) -> Iterator[Batch]:
        """Endless batches to learn from.

        Args:
            step: Says how many rows, and in which order.
        """
        batches = self._batches(step)
        while True:
            yield self._on_device(batches.next())

    def to_score(self, batch: int) -> Iterator[Batch]:
        """The rows held out, once.

        Args:
            batch: Rows at a time.
        """
        share = RowShare(batch, self.config.sequence_length, self.pad_token_id)
        for each in held_out_batches(self.held_out_rows, self.held_out, share):
            yield self._on_device(each)

    def to_calibrate(self, batch: int = 8) -> list[Tensor]:
        """The first rows to learn from: tokens int64 [B, T], a list of batches.

        Args:
            batch: Rows at a time.
        """
        assert self.train_rows is not None
        share = RowShare(batch, self.config.sequence_length, self.pad_token_id)
        chosen = self.train[: self.config.num_calibration_rows]
        return [
            each["input_ids"].to(self.device)
            for each in held_out_batches(self.train_rows, chosen, share)
        ]

    def prompt(self, num_tokens: int) -> list[int]:
        """The beginning of the first row held out.

        Args:
            num_tokens: How many, at most.
        """
        rows, first = self.held_out_rows, self.held_out[0]
        where = slice(int(rows.starts[first]), int(rows.starts[first + 1]))
        return [int(token) for token in rows.tokens[where][:num_tokens]]

    def _on_device(self, batch: dict[str, Tensor]) -> Batch:
        tokens, labels = (batch[name].to(self.device) for name in ("input_ids", "labels"))
        return tokens[:, :-1], labels[:, 1:]
