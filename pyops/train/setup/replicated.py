"""Replicated: everything on every rank, and gradients that are reduced during backward, through a
codec if any; one-bit optimizers communicate themselves.

    rows -> forward -> loss -> backward --buckets, all-reduce--> optimizer over flat buffers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import naming_lost_ranks
from pyops.config import Config
from pyops.config.run_plan import loss_scale_of
from pyops.flat import FlatBuffer
from pyops.models import GPT
from pyops.parallel.losses import CountedLoss
from pyops.parallel.rows.batches import microbatches
from pyops.precision import PRECISIONS, LossScale
from pyops.train.setup.recipe import make_data_parallel, make_optimizer
from pyops.train.setup.state import load_optimizer_state, optimizer_state, read
from pyops.train.setup.strategy import Strategy

__all__ = ["FlatTrainer", "HasGradients", "Replicated", "held_bytes", "sum_over_ranks"]


class HasGradients(Protocol):
    """A model whose gradients lie in flat buffers: a DataParallel, say."""

    @property
    def flat(self) -> Sequence[FlatBuffer]:
        """The buffers."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Within, backward adds gradients and sends none."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        ...


class FlatTrainer:
    """Takes the steps of a GPT whose parameters lie in flat buffers on every rank.

    Args:
        config: The run's configuration.
        model: The GPT.
        parallel: Of the model.
        optimizer: Of the flat buffers.
        loss: Of a batch.
        group: The ranks; None: this one alone.

    Attributes:
        num_steps: How many steps were taken, skipped ones included.
        grad_norm: Of the last step; None where it was not finite.
        skipped: Steps that changed nothing, since the loss or a gradient was not finite.
        vote: Whether any rank voted in the last step.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        parallel: HasGradients,
        optimizer: Any,
        *,
        loss: CountedLoss,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.model, self.parallel, self.optimizer, self.loss = model, parallel, optimizer, loss
        self.num_steps, self.skipped = 0, 0
        self.grad_norm: float | None = None
        self.vote = False
        self._seed = config.train.seed
        # Rows of documents have targets as many as fit.
        self._uneven = config.data.packing != "none"
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        share = config.train.batch // self._ranks
        self._num_microbatches = config.parallel.cut(share, micro_batch=config.train.micro_batch)
        self.loss_scale: LossScale | None = None
        if PRECISIONS[config.precision.dtype].scaled:
            self.loss_scale = loss_scale_of(config.precision)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step(self, batch: Mapping[str, Any], *, vote: bool = False) -> float:
        """Take one optimizer step. A collective.

        Args:
            batch: This rank's rows, on all ranks equally many.
            vote: Whether this rank is to stop, say.

        Returns:
            The mean loss over the terms that the loss counts, of all ranks.
        """
        # nats, bytes, ranks that vote
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        totals[1], totals[2] = self.loss.count(batch), float(vote)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        totals[0] = self._differentiate(batch, scale=scale / self._divisor(batch))
        nats, count, votes = self._of_all(totals).tolist()
        self.vote = votes > 0
        self.grad_norm = self._update(finite=math.isfinite(nats))
        self.num_steps += 1
        return float(nats / count)

    def _of_all(self, totals: Tensor) -> Tensor:
        """What the ranks tell one another in a step."""
        return sum_over_ranks(totals)

    def _divisor(self, batch: Mapping[str, Any]) -> float:
        """By how much the gradients of all ranks are divided."""
        own = self.loss.divisor(batch)
        if not self._uneven:
            return own * self._ranks
        total = torch.tensor(own, dtype=torch.float64, device=self._device)
        return float(sum_over_ranks(total)) or 1.0

    def _differentiate(self, batch: Mapping[str, Any], *, scale: float) -> Tensor:
        """Nats of this rank's sequences; their gradients, times `scale`, are reduced, or on their
        way."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        several = microbatches(batch, self._num_microbatches)
        row = self._rank * sum(len(rows["tokens_BT"]) for rows in several)
        for i, rows in enumerate(several):
            shape = (rows["tokens_BT"].shape[0], rows["tokens_BT"].shape[1])
            self.model.set_dropout(shape, seed=self._seed, step=self.num_steps, first_row=row)
            row += shape[0]
            # The last backward communicates the sum of all.
            last = i + 1 == len(several)
            with nullcontext() if last else self.parallel.no_sync():
                nats = self._nats(self.parallel, rows)
                (nats * scale).backward()
            total += nats.detach()
        return total

    def _nats(self, model: Callable[..., Any], rows: Mapping[str, Any]) -> Tensor:
        """Sum over the rows of -ln p(next token)."""
        return self.loss.sum(model(**rows), rows)

    def _update(self, *, finite: bool) -> float | None:
        """Step the optimizer, unless the loss or a gradient is not finite; the gradient's norm,
        None when it is not."""
        norm = math.nan
        if finite:
            if self.loss_scale is not None:
                self.optimizer.grad_scale = torch.full(
                    (), self.loss_scale.scale, device=self._device
                )
            # The optimizer looks at the norm itself, and changes nothing but zeroes gradients if
            # it is not finite.
            self.optimizer.step()
            norm = float(self.optimizer.grad_norm)
        if self.loss_scale is not None:
            self.loss_scale.update(not math.isfinite(norm))
        if math.isfinite(norm):
            return norm
        for buffer in self.parallel.flat:
            buffer.zero_grad()
        self.skipped += 1
        return None

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """The mean loss over the terms of all ranks' batches, without dropout. A collective; the
        ranks may have different numbers of batches.

        Args:
            batches: As for `step`; some may have no rows.
        """
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in batches:
            if not len(batch["tokens_BT"]):
                continue
            totals[1] += self.loss.count(batch)
            for rows in microbatches(batch, self._num_microbatches):
                totals[0] += self._nats(self.model, rows)
        self.model.train()
        nats, count = sum_over_ranks(totals).tolist()
        return float(nats / count)


def sum_over_ranks(totals: Tensor) -> Tensor:
    """The sums over all ranks, in place."""
    if dist.is_initialized():
        with naming_lost_ranks("the sum of losses"):
            dist.all_reduce(totals)
    return totals


class Replicated(Strategy):
    """Everything on every rank.

    Args:
        config: The run's configuration.
        model: The GPT, on its device.
        group: The ranks.
        loss: Of a batch.
    """

    def __init__(
        self, config: Config, model: GPT, *, group: dist.ProcessGroup | None, loss: CountedLoss
    ) -> None:
        self.model = model
        self.parallel = make_data_parallel(config, model, group=group)
        self.optimizer = make_optimizer(config, self.parallel, group=group)
        self.trainer: FlatTrainer = FlatTrainer(
            config, model, self.parallel, self.optimizer, loss=loss, group=group
        )
        self.communicator = self.parallel.reducer.communicator
        self.loss_scale = self.trainer.loss_scale or LossScale(initial=1.0)

    def state(self) -> dict[str, Any]:
        """See `Strategy.state`."""
        return {"model": self.model.state_dict(), **optimizer_state(self.optimizer, self.parallel)}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load`."""
        state = read(
            {key: state[key] for key in ("model", "optimizer", "communication") if key in state}
        )
        self.model.load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, self.parallel, state)

    def memory(self) -> dict[str, int]:
        """See `Strategy.memory`."""
        return held_bytes(self.model, self.parallel, self.optimizer)


def held_bytes(
    model: nn.Module, parallel: HasGradients, optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """{"parameters", "gradients", "states"}: bytes of a model in flat buffers."""
    states = [value for entries in optimizer.state.values() for value in entries.values()]
    flat = [buffer.data for buffer in parallel.flat]
    return {
        "parameters": _bytes([*model.parameters(), *flat]),
        "gradients": _bytes(buffer.grad for buffer in parallel.flat),
        "states": _bytes(states),
    }


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the tensors' storages, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if isinstance(t, Tensor)
    }
    return sum(storages.values())
