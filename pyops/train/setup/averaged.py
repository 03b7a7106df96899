"""Averaged: every rank is a replica that trains on its own, and all meet now and then, as
[asynchronous] says.

    rows -> forward -> loss -> backward -> optimizer        of this rank alone, at every step
                                             |
                                          LocalSGD          of all ranks, every `every` steps

A checkpoint has the global values as its model, so that any run reads it, and beside them what each
replica has of its own: a row for each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.config import Config
from pyops.data_parallel import DataParallel
from pyops.flat import Shard
from pyops.local_sgd import LocalSGD
from pyops.mesh import ALONE
from pyops.models import GPT
from pyops.parallel.losses import CountedLoss
from pyops.precision import LossScale
from pyops.train.setup.recipe import make_data_parallel, make_optimizer
from pyops.train.setup.replicated import FlatTrainer, held_bytes, sum_over_ranks
from pyops.train.setup.state import load_optimizer_state, optimizer_state, read
from pyops.train.setup.strategy import Strategy

__all__ = ["Averaged", "ReplicaTrainer"]


class ReplicaTrainer(FlatTrainer):
    """Takes the steps of a replica, and meets the others.

    Args:
        config: The run's configuration.
        model: The GPT.
        parallel: Of the model, over this process alone.
        optimizer: Of the flat buffers.
        loss: Of a batch.
        outer: What brings the replicas together.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        parallel: DataParallel,
        optimizer: Any,
        *,
        loss: CountedLoss,
        outer: LocalSGD,
    ) -> None:
        replicas = outer.exchange.size
        own = replace(config, train=replace(config.train, batch=config.train.batch // replicas))
        super().__init__(own, model, parallel, optimizer, loss=loss, group=None)
        self._rank = outer.exchange.rank  # its rows have dropout masks of their own
        self.outer = outer

    def step(self, batch: Mapping[str, Any], *, vote: bool = False) -> float:
        """Take one optimizer step; where replicas meet, a collective.

        Args:
            batch: This replica's rows.
            vote: Whether this rank is to stop; the others are told when they meet.

        Returns:
            The mean loss of this replica; where replicas meet, of all.
        """
        loss = super().step(batch, vote=vote)
        self.outer.step()
        return loss

    def _of_all(self, totals: Tensor) -> Tensor:
        if self.outer.meets(self.outer.steps + 1):
            return sum_over_ranks(totals)
        totals[2] = 0.0  # all stop at the same step
        return totals

    def _divisor(self, batch: Mapping[str, Any]) -> float:
        return self.loss.divisor(batch) or 1.0

    def evaluate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """The mean loss of the global values over all ranks' batches. A collective."""
        with self.outer.global_values():
            return super().evaluate(batches)


class Averaged(Strategy):
    """Every rank is a replica.

    Args:
        config: The run's configuration.
        model: The GPT, on its device.
        group: The ranks; None: this one alone.
        loss: Of a batch.
    """

    def __init__(
        self, config: Config, model: GPT, *, group: dist.ProcessGroup | None, loss: CountedLoss
    ) -> None:
        self.model = model
        self.parallel = make_data_parallel(config, model, group=ALONE)
        self.optimizer = make_optimizer(config, self.parallel, group=None)
        self.outer = LocalSGD(model, self.optimizer, config.asynchronous, group=group or ALONE)
        self.trainer: ReplicaTrainer = ReplicaTrainer(
            config, model, self.parallel, self.optimizer, loss=loss, outer=self.outer
        )
        self.communicator = None if group is None else Communicator.of(group)
        self.loss_scale = LossScale(initial=1.0)
        self.described = f"{self.outer.exchange.size} replicas, {config.asynchronous.method}"

    def state(self) -> dict[str, Any]:
        """See `Strategy.state`; and {"replicas": what each has of its own}."""
        outer = self.outer.state_dict()
        own = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.optimizer, self.parallel)["optimizer"],
            "outer": outer,
        }
        rows = _rows(own, rank=self.outer.exchange.rank, size=self.outer.exchange.size)
        with self.outer.global_values():
            whole = {key: value.clone() for key, value in self.model.state_dict().items()}
        return {"model": whole, "replicas": rows}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load`: this replica's row, where there are as many as then; otherwise the
        global values, and the other states of one of the replicas."""
        rank, size = self.outer.exchange.rank, self.outer.exchange.size
        rows = read(state["replicas"])
        counts = {len(value) for value in rows["model"].values()}
        own = _taken(rows, lambda row: row[rank % len(row)])
        alike = counts == {size}
        self.model.load_state_dict(own["model"] if alike else read(state["model"]))
        load_optimizer_state(self.optimizer, self.parallel, {"optimizer": own["optimizer"]})
        if not alike:
            own["outer"]["arrived"] = []
        self.outer.load_state_dict(own["outer"])

    def memory(self) -> dict[str, int]:
        """See `Strategy.memory`."""
        return held_bytes(self.model, self.parallel, self.optimizer)


def _rows(state: Any, *, rank: int, size: int) -> Any:
    """A state with each tensor as row `rank` of one of `size` rows."""
    if isinstance(state, Tensor):
        row = state.detach().unsqueeze(0)
        return Shard((size, *state.shape), (rank, *(0 for _ in state.shape)), row)
    return _each(state, lambda value: _rows(value, rank=rank, size=size))


def _taken(state: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """A state with `take` of each tensor in its place."""
    return take(state) if isinstance(state, Tensor) else _each(state, lambda v: _taken(v, take))


def _each(state: Any, change: Callable[[Any], Any]) -> Any:
    """A nested state with every value changed."""
    if isinstance(state, Mapping):
        return {key: change(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(change(value) for value in state)
    return state
