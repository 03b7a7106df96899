"""HealingReplica: the step that is repeated where a replica is lost, whatever takes it.

    forward -> (loss, rows) of all -> backward, collectives -> optimizer
       ^            |                       |
       '--- a replica is lost: the others meet, and go on from a state that all of them have

torchft (Meta) agrees on a quorum at a server of its own, the lighthouse; here a store is enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import CommunicationError, DisagreementError
from pyops.flat import Placement
from pyops.healing.quorum import Quorum, QuorumConfig
from pyops.healing.state_lost import StateLostError

__all__ = ["Compute", "HasState", "HealingReplica", "Part", "check_not_cut"]

TRIES = 3  # of a step, by the same replicas


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


class HealingReplica(ABC):
    """One of the replicas that live, each one process on Gloo.

    Args:
        model: The same on every replica up to the values.
        store: A store of torch.distributed that all replicas reach and none of them holds.
        config: How many replicas are enough, and how long they wait.
        extra: By name, what else has a state, the same on every replica.
        steps: How many have been taken.

    Attributes:
        steps: How many have been taken.
        quorum: Who is there.
    """

    def __init__(
        self,
        model: nn.Module,
        store: dist.Store,
        *,
        config: QuorumConfig | None,
        extra: Mapping[str, HasState] | None,
        steps: int,
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps is {steps!r}; give a whole number, 0 or more")
        self.model, self.steps, self.extra = model, steps, dict(extra or {})
        self._compute: Compute | None = None
        self._met = self._grows = False
        self._failures = 0
        self._failed_with: list[int] = []
        self.quorum = Quorum(store, config)

    def step(self, compute: Compute) -> float:
        """Take one step, with all replicas that live.

        Args:
            compute: (module, part) -> (the sum of the losses of this replica's rows, their number).
                It is called again where the step is repeated, with another part, and must depend on
                the part alone; torch's random numbers on the CPU are those of the first time.

        Returns:
            The loss of a row, the mean over the rows of all replicas, the same on each.

        Raises:
            StateLostError: No replica that lives has the state of the run.
            CommunicationError: Too few replicas live, one that lives does not come, the store is
                gone, or the step fails again and again though the same replicas live.
        """
        self._compute = compute
        if self._grows:
            self._abandon()
        while True:
            if not self._met:
                self._heal()
            buffers = [buffer.clone() for buffer in self.model.buffers()]
            random = torch.get_rng_state()
            try:
                loss = self._attempt(compute)
            except DisagreementError:
                raise
            except StateLostError:
                self._abandon()
                self.quorum.leave()
                raise
            except CommunicationError as error:
                with torch.no_grad():
                    for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                        buffer.copy_(before)
                torch.set_rng_state(random)
                self._failed(error)
                continue
            self._failures = 0
            return loss

    def close(self) -> None:
        """Leave, at the end of training: the others do not wait for this replica."""
        self._abandon()
        if self.steps:
            self.quorum.note_progress(self.steps)
        self.quorum.leave()

    # --- what a kind of data parallelism does in its own way

    @abstractmethod
    def _take(self, compute: Compute, part: Part) -> tuple[Tensor, int]:
        """(the sum of the losses, rows) of this replica's rows."""

    @abstractmethod
    def _apply(self, loss: Tensor, *, rows: float) -> None:
        """Backward, and the optimizer's step.

        Args:
            loss: As `_take` gave it.
            rows: Of all replicas.
        """

    @abstractmethod
    def _begin(self, group: dist.ProcessGroup, steps: list[int]) -> None:
        """Take up the state with which all go on. A collective.

        Args:
            group: The replicas that live.
            steps: How many each of them has taken, by rank.
        """

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of the group, whole or not; parameters keep memory of their own."""

    @abstractmethod
    def _signature(self) -> list[tuple[Any, ...]]:
        """What is the same on replicas of one run."""

    # --- steps and meetings

    def _attempt(self, compute: Compute) -> float:
        """The mean loss."""
        part = Part(self.steps, dist.get_rank(), dist.get_world_size())
        loss, rows = self._take(compute, part)
        waits = float(self.quorum.somebody_waits())
        at = float(self.steps)
        told = float(loss.detach()), float(rows), waits, 0.0, at, at * at
        total, of_all, waiting, ended, steps, squares = self._summed(*told)
        if ended:
            raise self._over(self.steps)
        if squares * part.size != steps * steps:  # by Cauchy and Schwarz: they are not all equal
            raise DisagreementError(
                f"replica {self.quorum.replica} takes step {self.steps}, others take another: "
                "change `steps` before the first step alone"
            )
        self._grows = waiting > 0
        self._apply(loss, rows=of_all)
        self.steps += 1
        return total / of_all

    @staticmethod
    def _summed(*numbers: float) -> list[float]:
        """Sums over the replicas: of losses, rows, those that see that a replica waits, those that
        end, numbers of the step, and their squares."""
        totals = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        all_reduce(totals, group=dist.group.WORLD, label="losses and rows")
        found: list[float] = totals.tolist()
        return found

    def _end_together(self) -> None:
        """Meet those that have taken the last step; a replica that joined since is told."""
        self._summed(0.0, 0.0, 0.0, 1.0, 0.0, 0.0)

    def _abandon(self) -> None:
        """Leave the group; parameters keep their values, and gradients are forgotten."""
        self._let_go()
        self._met = self._grows = False
        self.quorum.abandon()

    def _failed(self, error: CommunicationError) -> None:
        """Leave the group after an error; raise it where nobody is lost who could be the reason."""
        members = self.quorum.members
        self._failures = self._failures + 1 if members == self._failed_with else 1
        self._failed_with = list(members)
        self._tell(error)
        self._abandon()
        if self._failures >= TRIES:
            self.quorum.leave()
            raise CommunicationError(
                f"replica {self.quorum.replica}: step {self.steps} failed {TRIES} times, though "
                f"replicas {members} live: {error}; where a step takes longer than "
                f"{self.quorum.config.timeout:g} seconds, give a longer timeout"
            ) from error

    def _tell(self, error: CommunicationError) -> None:
        """Have the others fail now who wait for this replica in shared memory, where they can't see
        that it leaves the group."""
        group = dist.group.WORLD
        if group is not None:
            with suppress(CommunicationError):
                Communicator.of(group).leave(error, device=torch.device("cpu"))

    def _heal(self) -> None:
        """Meet, and begin alike; again, where a replica is lost meanwhile."""
        while not self._met:
            group = self.quorum.meet()
            try:
                self._begin(group, self._compared(group))
                if dist.get_rank(group) == 0:
                    self.quorum.note_progress(self.steps)
                self._met = True
            except Exception as error:
                final = DisagreementError, StateLostError
                if isinstance(error, CommunicationError) and not isinstance(error, final):
                    self._failed(error)
                    continue
                self._abandon()
                self.quorum.leave()
                raise

    def _compared(self, group: dist.ProcessGroup) -> list[int]:
        """How many steps each replica has taken. ValueError on one that is not like the furthest.
        A collective."""
        signature = [*self._signature(), *((f"extra {name}",) for name in sorted(self.extra))]
        found = gather((self.steps, signature, self.quorum.noted_progress()), group=group)
        steps = [taken for taken, _, _ in found]
        if max(steps) < (noted := max(noted for _, _, noted in found)):
            raise self._over(noted, has=max(steps))
        source = steps.index(max(steps))
        expected = found[source][1]
        if signature != expected:
            differs = next((pair for pair in signature if pair not in expected), "fewer entries")
            raise ValueError(
                f"this replica has {differs}, which replica {self.quorum.members[source]} has not; "
                "build the same model, optimizer and extra on every replica"
            )
        if any(other != expected for _, other, _ in found):
            raise CommunicationError("a replica with another model was refused")
        return steps

    def _over(self, noted: int, *, has: int = 0) -> StateLostError:
        return StateLostError(
            f"replica {self.quorum.replica}: the run has taken {noted} steps, and none of the "
            f"replicas that go on has its state ({has} steps): it is over, or lost; go on from a "
            "checkpoint, with another store or prefix"
        )

    def _tensors(self) -> list[tuple[Any, ...]]:
        """Names, shapes and dtypes of the model."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors]


def check_not_cut(model: nn.Module) -> None:
    """ValueError where a parameter is cut over ranks: nobody else has the part of a lost one."""
    for name, placement in Placement.of(model).items():
        if placement.local_shape != placement.global_shape:
            raise ValueError(
                f"{name} is cut over ranks (tensor parallelism, say), and the part of a lost rank "
                "can't be healed; use parameters that are whole on each replica"
            )
