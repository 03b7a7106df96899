"""Trial: some steps of a GPT with the sections of a run, on made-up tokens, as `pyops train` takes
them: how long they take here, and how much memory.

    trial = Trial(config)          a collective, like every step of it
    trial.step()                   seconds of this rank
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from pyops.config import Config
from pyops.train.setup.gpt_layers import HeadLoss, batch_of, rows_of
from pyops.train.setup.planned import Planned
from pyops.train.setup.recipe import is_planned, make_mesh, make_model
from pyops.train.setup.replicated import Replicated
from pyops.train.setup.strategy import Strategy

__all__ = ["Trial"]


class _Tokens:
    """A tokenizer of nothing: a loss counts tokens."""

    vocab_size = 0

    def token_bytes(self, tokens: np.ndarray) -> int:
        return int(tokens.size)

    def encode(self, text: bytes) -> np.ndarray:
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        raise NotImplementedError


class Trial:
    """The strategy of a run over a GPT, and one batch for it.

    Args:
        config: Of the run; its data are not read.
        device: Of the model.

    Attributes:
        strategy: What a run would train with.
        batch_bytes: Of its tokens and targets.

    Raises:
        ConfigError: On every rank alike, where the ranks can't share the model so.
    """

    def __init__(self, config: Config, *, device: torch.device | None = None) -> None:
        where = device or torch.device("cpu")
        mesh = make_mesh(config, device_type=where.type)
        model = make_model(config, mesh, device=where)
        loss = HeadLoss(_Tokens())
        rows = config.train.batch // mesh.size("dp")
        self.strategy: Strategy
        if is_planned(config):
            self.strategy = Planned(config, model, mesh, loss=loss, num_rows=rows, device=where)
        else:
            self.strategy = Replicated(config, model, group=mesh.group("dp"), loss=loss)
        generator = torch.Generator().manual_seed(mesh.rank("dp"))
        shape = (rows, config.model.sequence_length + 1)
        text_BT = torch.randint(config.model.vocab_size, shape, generator=generator)
        self.batch_bytes = 2 * text_BT[:, :-1].nbytes
        self._batch: Mapping[str, Any] = batch_of(rows_of(text_BT), where)
        self._device = where

    def step(self) -> float:
        """Take one step; the seconds that it took on this rank."""
        start = time.perf_counter()
        self.strategy.trainer.step(self._batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start
