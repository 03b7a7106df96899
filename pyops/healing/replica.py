"""HealingDataParallel: a step of data parallelism that is repeated where a replica is lost.

    forward -> (loss, rows) of all -> backward, all-reduce -> optimizer
       ^            |                       |
       '--- a replica is lost: the others meet, who is behind takes the state of the furthest

torchft (Meta) agrees on a quorum at a server of its own, the lighthouse; here a store is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.data_parallel import DataParallel
from pyops.flat import Placement
from pyops.healing.peer_state import send_state
from pyops.healing.quorum import Quorum, QuorumConfig

__all__ = ["HealingDataParallel", "Part"]


class HasState(Protocol):
    """What `extra` takes: a learning-rate schedule, for one."""

    def state_dict(self) -> dict[str, Any]:
        """What a replica that joins is given."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take it up."""


@dataclass(frozen=True)
class Part:
    """What a replica computes in a step."""

    step: int
    """The number of the step: which batch it is."""
    rank: int
    """Of this replica among those that are there."""
    size: int
    """How many replicas are there."""

    def rows(self, count: int) -> slice:
        """This replica's rows of a batch of `count` rows, of which each replica that is there has
        as many as the others, or one more."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)


Compute = Callable[[nn.Module, Part], tuple[Tensor, int]]


class HealingDataParallel:
    """Data parallelism over the replicas that live, each one process on Gloo, in place of
    DataParallel and of the process group.

    A step is applied by all replicas that go on or by none. Where one dies, the others leave the
    group, agree in the store on who lives, and repeat the step, of which the batch is divided anew.
    Where some had applied it already, the others take their state: parameters, buffers, states of
    the optimizer and of `extra`, in buckets. So does a replica that joins, between two steps.

    Args:
        model: The same on every replica up to the values.
        optimizer: Of its parameters, whole on each replica: any but a ZeroOptimizer, whose shards
            would be lost with a replica.
        store: A store of torch.distributed that all replicas reach and none of them holds.
        config: How many replicas are enough, and how long they wait.
        extra: By name, what else has a state, the same on every replica: schedules, scalers.
        steps: How many have been taken, for a run that begins at a checkpoint.

    Attributes:
        steps: How many have been taken.
        quorum: Who is there.

    Raises:
        ValueError: There is a process group; an optimizer that keeps a part of its states alone; a
            model that is not whole here. Nothing is changed.
        CommunicationError: In `step`: too few replicas live, one that lives does not come, or the
            store is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: dist.Store,
        *,
        config: QuorumConfig | None = None,
        extra: Mapping[str, HasState] | None = None,
        steps: int = 0,
    ) -> None:
        _check_whole(model, optimizer)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps is {steps!r}; give a whole number, 0 or more")
        self.model, self.optimizer, self.steps = model, optimizer, steps
        self.extra = dict(extra or {})
        self._parallel: DataParallel | None = None
        self.quorum = Quorum(store, config)

    def step(self, compute: Compute) -> float:
        """Take one step, with all replicas that live.

        Args:
            compute: (module, part) -> (the sum of the losses of this replica's rows, their number).
                It is called again where the step is repeated, with another part, and must depend on
                the part alone; torch's random numbers on the CPU are those of the first time.

        Returns:
            The loss of a row, the mean over the rows of all replicas, the same on each.
        """
        while True:
            if self._parallel is None:
                self._heal()
            buffers = [buffer.clone() for buffer in self.model.buffers()]
            random = torch.get_rng_state()
            try:
                loss, grows = self._attempt(compute)
            except DisagreementError:
                raise
            except CommunicationError:
                with torch.no_grad():
                    for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                        buffer.copy_(before)
                torch.set_rng_state(random)
                self._abandon()
                continue
            if grows:
                self._abandon()
            return loss

    def close(self) -> None:
        """Leave, at the end of training: the others do not wait for this replica."""
        self._abandon()
        self.quorum.leave()

    def _attempt(self, compute: Compute) -> tuple[float, bool]:
        """The mean loss, and whether replicas wait to join."""
        assert self._parallel is not None
        self.optimizer.zero_grad()
        part = Part(self.steps, dist.get_rank(), dist.get_world_size())
        loss, rows = compute(self._parallel, part)
        waits = float(self.quorum.somebody_waits())
        totals = torch.tensor([float(loss.detach()), float(rows), waits], dtype=torch.float64)
        all_reduce(totals, group=dist.group.WORLD, label="losses and rows")
        # Gradients are summed: each is divided by the rows of all replicas that are there.
        (loss / totals[1].item()).backward()
        self.optimizer.step()
        self.steps += 1
        return (totals[0] / totals[1]).item(), bool(totals[2] > 0)

    def _abandon(self) -> None:
        """Leave the group; parameters keep their values, and gradients are forgotten."""
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None
        self.quorum.abandon()

    def _heal(self) -> None:
        """Meet, and begin alike; again, where a replica is lost meanwhile."""
        while self._parallel is None:
            group = self.quorum.meet()
            try:
                self._begin_alike(group)
                self._parallel = DataParallel(self.model, group=group, reduction="sum")
            except DisagreementError:
                raise
            except CommunicationError:
                self.quorum.abandon()

    def _begin_alike(self, group: dist.ProcessGroup) -> None:
        """Who is behind takes the state of the replica that is furthest; of rank 0's at a tie."""
        signature = _signature(self.model, self.optimizer, self.extra)
        found = gather((self.steps, signature), group=group)
        furthest = max(steps for steps, _ in found)
        source = next(rank for rank, (steps, _) in enumerate(found) if steps == furthest)
        expected = found[source][1]
        if signature != expected:
            differs = next((pair for pair in signature if pair not in expected), "fewer entries")
            self.close()
            raise ValueError(
                f"this replica has {differs}, which replica {self.quorum.members[source]} has not; "
                "build the same model, optimizer and extra on every replica"
            )
        if any(other != expected for _, other in found):
            raise CommunicationError("a replica with another model was refused")
        if all(steps == furthest for steps, _ in found):
            return
        state = send_state(self._state(), source=source, group=group)
        if self.steps < furthest:
            self._load(state)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "extra": {name: each.state_dict() for name, each in self.extra.items()},
            "steps": self.steps,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, each in self.extra.items():
            each.load_state_dict(state["extra"][name])
        self.steps = state["steps"]


def _signature(
    model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, HasState]
) -> list[tuple[Any, ...]]:
    """What is the same on replicas of one run."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        *((name, tuple(t.shape), str(t.dtype)) for name, t in tensors),
        ("optimizer", type(optimizer).__name__),
        *((f"extra {name}",) for name in sorted(extra)),
    ]


def _check_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """ValueError where a replica's death would take what nobody else has."""
    if hasattr(optimizer, "communicator"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which communicates by itself, or has "
            "states that are spread over the ranks: those of a lost replica can't be healed; use "
            "one that is whole on each replica, such as pyops.optim.AdamW, or restart from a "
            "checkpoint"
        )
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in own:
                raise ValueError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(p.shape)} "
                    "that is not the model's, which a replica that joins would not get; make the "
                    "optimizer of model.parameters()"
                )
    for name, placement in Placement.of(model).items():
        if placement.local_shape != placement.global_shape:
            raise ValueError(
                f"{name} is cut over ranks (tensor parallelism, say), and the part of a lost rank "
                "can't be healed; use parameters that are whole on each replica"
            )
