"""TextTask: the next token of a corpus."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.context_parallel import ContextRanks
from pyops.data import Corpus
from pyops.models import GPT, GPTConfig
from pyops.train.tasks.task import NatsTask

__all__ = ["TextTask"]


class TextTask(NatsTask):
    """The next token, in every sequence of T of a corpus: sample i is tokens [i T, i T + T]."""

    name = "text"

    def __init__(
        self, config: GPTConfig, corpus: Corpus, *, most_held_out: int, order: str = "zigzag"
    ) -> None:
        self._config, self._order, length = config, order, config.sequence_length
        self._texts, self.digest = (corpus.train, corpus.validation), corpus.digest
        self.samples, available = ((len(text) - 1) // length for text in self._texts)
        self.held_out = min(most_held_out, available)
        self._places = torch.tensor(
            [i * available // self.held_out for i in range(self.held_out)], device="cpu"
        )
        self.block_count, self.tokens = config.num_layers, length
        self.terms = self.held_out_terms = length

    def model(
        self,
        *,
        seed: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        context: ContextRanks | None = None,
    ) -> nn.Module:
        return GPT(
            self._config,
            context=context,
            order=self._order,
            seed=seed,
            device=device,
            dtype=dtype,
        )

    def _rows(self, rows: Tensor, epoch: int, held_out: bool) -> tuple[Tensor, Tensor]:
        text, length = self._texts[held_out], self.tokens
        places = (self._places[rows] if held_out else rows).tolist()
        found = [
            torch.from_numpy(text[n * length : (n + 1) * length + 1].astype("int64"))
            for n in places
        ]
        whole_BT = (
            torch.stack(found)
            if found
            else torch.zeros(0, length + 1, dtype=torch.int64, device="cpu")
        )
        return whole_BT[:, :-1], whole_BT[:, 1:]
