"""Downpour: every rank is a replica on a clock of its own and holds a shard of the parameters, as
[asynchronous] says (Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.1).

    rank 0   rows -> loss -> backward -> push to all shards, fetch from all      thread: shard 0
    rank 1        rows -> loss -> backward -> push, fetch                        thread: shard 1

Ranks meet every `every` steps, where the mean loss is reported and signals are heard, and wherever
the held-out loss is measured or a checkpoint is written: then all pushes are applied first, and
every replica has the shards' parameters. A checkpoint has them as its model and the optimizer's
states as whole vectors, so that any number of ranks reads it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import gather, on_first_rank
from pyops.config import Config, ConfigError, OptimizerConfig
from pyops.flat import FlatBuffer, Shard
from pyops.models import GPT
from pyops.parallel.losses import CountedLoss
from pyops.parameter_server import Client, HostedShard, ServerConfig, connect, stop
from pyops.parameter_server.vectors import cut
from pyops.precision import LossScale
from pyops.torch_private import default_store
from pyops.train.setup.recipe import optimizer_maker
from pyops.train.setup.replicated import FlatTrainer, held_bytes, sum_over_ranks
from pyops.train.setup.state import read
from pyops.train.setup.strategy import Strategy

__all__ = ["Downpour", "DownpourTrainer"]

POLL = 0.02  # seconds
WARM = "warm"


class _Replica:
    """The model of a replica, which sends no gradient during backward.

    Args:
        model: The GPT.
        buffer: Its parameters and their gradients.
    """

    def __init__(self, model: GPT, buffer: FlatBuffer) -> None:
        self.model, self.flat = model, [buffer]

    def no_sync(self) -> AbstractContextManager[None]:
        """See `HasGradients.no_sync`."""
        return nullcontext()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)


class DownpourTrainer(FlatTrainer):
    """Takes the steps of a replica, whose gradients go to the shards.

    Args:
        config: The run's configuration.
        model: The GPT.
        client: Of the model.
        optimizer: Of the shard that this process holds.
        loss: Of a batch.
        store: Where replicas leave notes for each other.
        ranks: (this rank, how many there are).
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        client: Client,
        optimizer: torch.optim.Optimizer,
        *,
        loss: CountedLoss,
        store: dist.Store,
        ranks: tuple[int, int],
    ) -> None:
        rank, replicas = ranks
        own = replace(config, train=replace(config.train, batch=config.train.batch // replicas))
        parallel = _Replica(model, client.buffer)
        super().__init__(own, model, parallel, optimizer, loss=loss, group=None)
        self.client, self.replicas = client, replicas
        self._rank = rank  # its rows have dropout masks of their own
        self._config, self._store, self._begun = config, store, False
        self._max_norm = config.optimizer.max_grad_norm or math.inf

    def step(self, batch: Mapping[str, Any], *, vote: bool = False) -> float:
        """Compute a gradient, and push and fetch what is due; where replicas meet, a collective.

        Args:
            batch: This replica's rows.
            vote: Whether this rank is to stop; the others are told when they meet.

        Returns:
            The mean loss of this replica; where replicas meet, of all.
        """
        self._begin()
        loss = super().step(batch, vote=vote)
        if self._rank == 0 and self.num_steps == self._config.asynchronous.warm_start:
            self._store.set(WARM, "1")
        return loss

    def _begin(self) -> None:
        """Before the first step of a run, the replicas but the first wait for its warm start."""
        if self._begun:
            return
        self._begun = True
        if self.num_steps or self._rank == 0 or not self._config.asynchronous.warm_start:
            return
        while not self._store.check([WARM]):
            time.sleep(POLL)
        self.fetch()

    def fetch(self) -> None:
        """Take the shards' parameters as they are now."""
        for pending in self.client.first_fetch():
            pending.result()

    def meet(self) -> None:
        """Apply all pushes, and take the shards' parameters: all replicas have the same afterwards.
        A collective."""
        self.client.settle()
        gather(None)
        self.fetch()
        gather(None)  # nobody pushes before all have fetched

    def meets(self, step: int) -> bool:
        """Whether ranks meet at the end of step 1, 2, ..."""
        train = self._config.train
        return (
            any(
                every > 0 and step % every == 0
                for every in (
                    self._config.asynchronous.every,
                    train.validate_every,
                    train.checkpoint_every,
                )
            )
            or step == train.num_steps
        )

    def _of_all(self, totals: Tensor) -> Tensor:
        if self.meets(self.num_steps + 1):
            return sum_over_ranks(totals)
        totals[2] = 0.0  # all stop at the same step
        return totals

    def _divisor(self, batch: Mapping[str, Any]) -> float:
        return self.loss.divisor(batch) or 1.0

    def _update(self, *, finite: bool) -> float | None:
        """Push the gradient, clipped, unless the loss or it is not finite; its norm."""
        gradient = self.client.buffer
        for index in range(len(gradient)):
            gradient.restore_gradient(index)
        norm = float(gradient.grad.norm()) if finite else math.nan
        if not math.isfinite(norm):
            gradient.grad.fill_(math.nan)  # the client leaves it out of its pushes
        elif norm > self._max_norm:
            gradient.grad.mul_(self._max_norm / norm)
        self.client.step()
        if math.isfinite(norm):
            return norm
        self.skipped += 1
        return None

    def evaluate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """The mean loss of the shards' parameters over all ranks' batches. A collective."""
        self.meet()
        return super().evaluate(batches)


class Downpour(Strategy):
    """Every rank is a replica and holds a shard. Made by all ranks together.

    Args:
        config: The run's configuration.
        model: The GPT, on its device.
        group: The ranks; None: this one alone.
        loss: Of a batch.

    Raises:
        ConfigError: A model that shards can't hold.
    """

    def __init__(
        self, config: Config, model: GPT, *, group: dist.ProcessGroup | None, loss: CountedLoss
    ) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.replicas = 1 if group is None else dist.get_world_size(group)
        self.model, self.communicator = model, None
        options = config.asynchronous
        try:
            self._starts = cut(model, shards=self.replicas)
            self._store = _store(group)
            codec = options.downpour.push_codec
            self.hosted = HostedShard(
                self._store,
                _optimizer_of_a_shard(config.optimizer),
                shard=self.rank,
                shards=self.replicas,
                server=ServerConfig(codecs=() if codec is None else (codec,)),
            )
            self.client = connect(
                model,
                self._store,
                worker=self.rank,
                shards=self.replicas,
                config=options.downpour,
            )
        except ValueError as error:
            raise ConfigError(f"asynchronous.method is 'downpour': {error}") from None
        self.trainer: DownpourTrainer = DownpourTrainer(
            config,
            model,
            self.client,
            self.hosted.shard.optimizer,
            loss=loss,
            store=self._store,
            ranks=(self.rank, self.replicas),
        )
        self.loss_scale = LossScale(initial=1.0)
        self._counted: Counter[int] = Counter()
        self.described = f"{self.replicas} replicas, downpour"

    def metrics(self) -> dict[str, float]:
        """{"staleness": mean of the pushes that were answered since the last step}, where there are
        any."""
        fresh = self.client.staleness - self._counted
        self._counted = Counter(self.client.staleness)
        pushes = fresh.total()
        if not pushes:
            return {}
        return {"staleness": sum(tau * count for tau, count in fresh.items()) / pushes}

    def state(self) -> dict[str, Any]:
        """See `Strategy.state`; "shards" has what the shards hold besides the parameters, and
        "errors" what a codec has left out of each replica's pushes."""
        self.trainer.meet()
        shard = self.hosted.shard
        found = shard.optimizer.state_dict()["state"].get(0, {})
        values = {**found, "applied": torch.tensor(shard.counts.applied)}
        whole = {key: value.clone() for key, value in self.model.state_dict().items()}
        shards = {key: self._part(value) for key, value in values.items()}
        state: dict[str, Any] = {"model": whole, "shards": shards}
        errors = [part.error for part in self.client.pushes]
        if all(error is not None for error in errors):
            row = torch.cat([error for error in errors if error is not None])[None]
            state["errors"] = Shard((self.replicas, row.shape[1]), (self.rank, 0), row)
        return state

    def _part(self, value: Tensor) -> Shard:
        """A vector of this shard as a range of the whole one; a number as one of a row of them."""
        if value.ndim:
            return Shard((self._starts[-1],), (self._starts[self.rank],), value)
        return Shard((self.replicas,), (self.rank,), value.reshape(1))

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load`: this rank's ranges, whatever the number of shards was then."""
        shards, begin, end = read(state["shards"]), *self._starts[self.rank : self.rank + 2]
        self.model.load_state_dict(read(state["model"]))
        values = self.client.buffer.data[begin:end].clone()
        numel = self._starts[-1]
        taken = {
            key: value[begin:end] if len(value) == numel else value.max()
            for key, value in shards.items()
        }
        applied = int(taken.pop("applied"))
        optimizer = self.hosted.shard.optimizer.state_dict()
        optimizer["state"][0] = taken
        gather(None)  # the others' first fetches are over
        self.hosted.shard.load_values(values, optimizer, applied=applied)
        gather(None)
        self.trainer.fetch()
        self.client.step_number = int(state["step"])
        rows = read(state["errors"]) if "errors" in state else ()
        if len(rows) == self.replicas:
            for part, error in zip(
                self.client.pushes, rows[self.rank].split(self._sizes), strict=True
            ):
                assert part.error is not None
                part.error.copy_(error)

    @property
    def _sizes(self) -> list[int]:
        return [part.numel for part in self.client.pushes]

    def memory(self) -> dict[str, int]:
        """See `Strategy.memory`."""
        return held_bytes(self.model, self.trainer.parallel, self.hosted.shard.optimizer)

    def close(self) -> None:
        """See `Strategy.close`."""
        self.client.close()
        gather(None)
        if self.rank == 0:
            stop(self._store)
        self.hosted.join()


def _optimizer_of_a_shard(options: OptimizerConfig) -> Any:
    make = optimizer_maker(options)
    return lambda flat: make([flat])


def _store(group: dist.ProcessGroup | None) -> dist.Store:
    """Where shards and replicas of this run find each other. A collective."""
    if group is None:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = default_store()
    run = on_first_rank(lambda: int(store.add("pyops/train/downpour", 1)))
    return dist.PrefixStore(f"pyops/train/downpour/{run}", store)
