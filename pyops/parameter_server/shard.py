"""ParameterShard: one part of the parameters, and the optimizer that applies pushes to it.

    join(worker) -> push, fetch, push, fetch ... -> leave(worker)

It has neither threads nor sockets: the carrier of messages calls `ready` first, and one method at
a time. The same object serves processes (`serve`) and virtual time (`VirtualTime`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyops.optim import LAMB, LARS, Adafactor
from pyops.parameter_server.config import ShardConfig
from pyops.parameter_server.messages import Kind, Reply, Request, Verdict
from pyops.parameter_server.vectors import all_finite

__all__ = ["Counts", "Loan", "MakeOptimizer", "Member", "ParameterShard", "check_optimizer"]

MakeOptimizer = Callable[[nn.Parameter], Optimizer]
BY_NORMS = (LAMB, LARS, Adafactor)


@dataclass
class Member:
    """What a shard keeps of a replica.

    Attributes:
        incarnation: The newest start of it.
        known: The sequence of its last push that was served.
        clock: Its pushes, begun at the slowest member's when it was first answered; None before.
        live: Whether it has joined and not left.
        fetched: How many of its fetches were answered in this incarnation.
    """

    incarnation: int = 0
    known: int = 0
    clock: int | None = None
    live: bool = False
    fetched: int = 0


@dataclass
class Counts:
    """What became of pushes: applied, and refused by Verdict; lost members; and pushes that were
    applied after the snapshot from which the shard was restarted."""

    applied: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost_members: int = 0
    lost_pushes: int = 0


def check_optimizer(optimizer: Optimizer) -> None:
    """ValueError for what needs more than the shard's numbers."""
    name = type(optimizer).__name__
    if isinstance(optimizer, BY_NORMS):
        raise ValueError(
            f"{name} goes by the norms of whole layers, and a shard holds parts of them; take an "
            "elementwise optimizer, such as pyops.optim.Adagrad"
        )
    if getattr(optimizer, "max_grad_norm", None) is not None:
        raise ValueError(
            f"{name} has max_grad_norm, and a shard sees a part of the gradients only; leave it "
            "out, and clip in the replicas"
        )


class Loan(Protocol):
    """Parameters that a replica reads where they lie."""

    def settle(self, number: int, values: Tensor) -> None:
        """The parameters are about to change: keep a copy, unless they are read already.

        Args:
            number: Of the fetch.
            values: The parameters.
        """
        ...


class ParameterShard:
    """One part of the parameters.

    Args:
        numel: Numbers in it.
        optimizer: Makes the optimizer of a flat parameter: an elementwise one, such as
            `lambda flat: pyops.optim.Adagrad([flat], lr=0.01)`.
        config: When it answers, what it applies, and what it keeps.
        dtype: fp32 or fp64.
        memory: Where the parameters lie, [numel] of zeros; None: in memory of their own.

    Attributes:
        version: Of the parameters: grows with every push that is applied, and never goes back.
        epoch: Which start of the shard this is.
        staleness: How many pushes were applied with which staleness.
        log: What was served, in order, where `config.record` says so: ("push", worker, sequence)
            and ("fetch", worker, number).

    Raises:
        ValueError: For an optimizer that needs more than these numbers.
    """

    def __init__(
        self,
        numel: int,
        optimizer: MakeOptimizer,
        *,
        config: ShardConfig | None = None,
        dtype: torch.dtype = torch.float32,
        memory: Tensor | None = None,
    ) -> None:
        self.config = config or ShardConfig()
        flat = torch.zeros(numel, dtype=dtype, device="cpu") if memory is None else memory
        self.parameter = nn.Parameter(flat)
        self._loans: dict[Loan, int] = {}
        self.optimizer = optimizer(self.parameter)
        check_optimizer(self.optimizer)
        self.initialized = False
        self.version = self.epoch = 0
        self.members: dict[int, Member] = {}
        self.counts = Counts()
        self.staleness: Counter[int] = Counter()
        self.log: list[tuple[str, int, int]] = []
        self._played = 0

    # members

    def _live(self) -> dict[int, Member]:
        return {worker: m for worker, m in self.members.items() if m.live}

    def join(self, worker: int, incarnation: int) -> Member:
        """A replica begins, or begins anew. The newest incarnation counts; an older one joins
        nothing."""
        member = self.members.setdefault(worker, Member())
        if incarnation > member.incarnation:
            member.incarnation, member.known, member.fetched = incarnation, 0, 0
            member.clock = None
        if incarnation == member.incarnation:
            member.live = True
        return member

    def leave(self, worker: int, incarnation: int, *, lost: bool = False) -> None:
        """A replica has ended.

        Args:
            worker: Its number.
            incarnation: Which start of it; another one than the newest changes nothing.
            lost: Whether it died, which is counted.
        """
        member = self.members.get(worker)
        if member is not None and member.live and member.incarnation == incarnation:
            member.live = False
            member.clock = None
            self.counts.lost_members += lost

    def initialize(self, values: Tensor) -> bool:
        """The first values. Says whether they were taken: the first replica's are."""
        if not self.initialized:
            with torch.no_grad():
                self.parameter.copy_(values)
            self.initialized = True
            return True
        return False

    # turns

    def ready(self, request: Request) -> bool:
        """Whether it is this request's turn: by the log that is replayed, or by the bounds on
        staleness."""
        if request.kind == Kind.LEAVE or self._outdated(request) is not None:
            return True
        if self.config.replay is not None:
            kind = "push" if request.kind == Kind.PUSH else "fetch"
            self._pass_over_fetches_of_the_left()
            at = self._played
            known = self.members[request.worker].known
            if kind == "push" and request.sequence <= known:
                return True
            log = self.config.replay
            return (
                self.initialized
                and at < len(log)
                and tuple(log[at])
                == (
                    kind,
                    request.worker,
                    request.sequence,
                )
            )
        return request.kind == Kind.PUSH or self._may_fetch(request)

    def _pass_over_fetches_of_the_left(self) -> None:
        """A replica may have left the recorded run while the answer to its last fetch was on its
        way, and leave the replay before that fetch is asked for: it changed nothing."""
        log = self.config.replay or ()
        while self._played < len(log):
            kind, worker, sequence = log[self._played]
            member = self.members.get(worker)
            gone = member is not None and not member.live and sequence == member.fetched + 1
            if kind != "fetch" or not gone:
                return
            self._played += 1

    def _may_fetch(self, request: Request) -> bool:
        live, worker = self._live(), request.worker
        if not self.initialized or worker not in live or live[worker].known < request.after:
            return False
        if self.counts.applied < self.config.warm_start and worker != min(live):
            return False
        bound, member = self.config.max_staleness, live[worker]
        if bound is None or member.clock is None:
            return True
        return member.clock - self._slowest() <= bound

    def _slowest(self) -> int:
        clocks = [m.clock for m in self._live().values() if m.clock is not None]
        return min(clocks, default=0)

    def _outdated(self, request: Request) -> Verdict | None:
        member = self.members.get(request.worker)
        if member is None or request.incarnation != member.incarnation:
            return Verdict.OLD_INCARNATION
        return Verdict.OLD_EPOCH if request.epoch != self.epoch else None

    # what is asked for

    def _reply(self, verdict: Verdict, request: Request, staleness: int = 0) -> Reply:
        known = self.members[request.worker].known if request.worker in self.members else 0
        return Reply(verdict, self.version, self.epoch, staleness, known)

    def _note(self, kind: str, request: Request) -> None:
        self._played += 1
        if self.config.record:
            self.log.append((kind, request.worker, request.sequence))

    def push(self, request: Request, gradient: Tensor, *, finite: bool | None = None) -> Reply:
        """Apply a push, once.

        Args:
            request: What came with it.
            gradient: [numel], of the shard's dtype.
            finite: Whether it is, where the caller has looked; None: the shard looks.

        Returns:
            What became of it: refused, where it is of an old incarnation or epoch, holds a number
            that is not finite, or is older than `drop_after`; nothing is changed then.
        """
        outdated = self._outdated(request)
        if outdated is not None:
            self.counts.refused[outdated.name] += 1
            return self._reply(outdated, request)
        member = self.members[request.worker]
        if request.sequence <= member.known:
            return self._reply(Verdict.REPEATED, request)
        self._note("push", request)
        member.known = request.sequence
        member.clock = None if member.clock is None else member.clock + 1
        staleness = self.version - request.seen
        if not (all_finite(gradient) if finite is None else finite):
            self.counts.refused[Verdict.NOT_FINITE.name] += 1
            return self._reply(Verdict.NOT_FINITE, request, staleness)
        if self.config.drop_after is not None and staleness > self.config.drop_after:
            self.counts.refused[Verdict.TOO_STALE.name] += 1
            return self._reply(Verdict.TOO_STALE, request, staleness)
        self._apply(gradient, staleness)
        return self._reply(Verdict.APPLIED, request, staleness)

    def _apply(self, gradient: Tensor, staleness: int) -> None:
        self._settle()
        self.parameter.grad = gradient
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.config.rate_by_staleness:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / (1 + staleness)
        self.optimizer.step()
        self.parameter.grad = None  # it lies where the next push is received
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.version += 1
        self.counts.applied += 1
        self.staleness[staleness] += 1

    def fetch(self, request: Request) -> tuple[Reply, Tensor]:
        """(reply, the parameters themselves, not a copy). An outdated request gets its verdict, and
        parameters that are not to be read."""
        outdated = self._outdated(request)
        if outdated is None:
            member = self.members[request.worker]
            if member.clock is None:
                member.clock = self._slowest()
            self._note("fetch", request)
            member.fetched += 1
        verdict = Verdict.FETCHED if outdated is None else outdated
        return self._reply(verdict, request), self.parameter.detach()

    def lend(self, loan: Loan, number: int) -> None:
        """A fetch's parameters are read where they lie: `loan` is settled before they change.

        Args:
            loan: Of the replica's session, which has one fetch at a time.
            number: Of the fetch.
        """
        self._loans[loan] = number

    def _settle(self) -> None:
        loans, self._loans = self._loans, {}
        for loan, number in loans.items():
            loan.settle(number, self.parameter.detach())

    # state

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer, version, and which pushes of whom are in them."""
        known = {w: (m.incarnation, m.known) for w, m in self.members.items()}
        return {
            "parameters": self.parameter.detach().clone(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "version": self.version,
            "epoch": self.epoch,
            "applied": self.counts.applied,
            "members": known,
            "played": self._played,
        }

    def load_values(self, values: Tensor, optimizer: dict[str, Any], *, applied: int) -> None:
        """Go on from the values of another run, while no push is on its way. Who has joined stays.

        Args:
            values: [numel], of the shard's dtype.
            optimizer: The optimizer's state.
            applied: How many pushes were applied, as `warm_start` counts them.
        """
        self._settle()
        with torch.no_grad():
            self.parameter.copy_(values)
        self.optimizer.load_state_dict(optimizer)
        self.counts.applied = applied

    def load_state_dict(self, state: dict[str, Any], *, restarted: bool = False) -> None:
        """Take over a state.

        Args:
            state: What `state_dict` gave.
            restarted: The state is a snapshot of a shard that was killed since: it may have served
                `snapshot_every` pushes after it, so the version goes on behind all that a replica
                can have seen.

        Raises:
            ValueError: Before anything is changed, for a state of another number of parameters.
        """
        values = state["parameters"]
        if values.shape != self.parameter.shape or values.dtype != self.parameter.dtype:
            raise ValueError(
                f"the state has {tuple(values.shape)} parameters of {values.dtype}, and this shard "
                f"{tuple(self.parameter.shape)} of {self.parameter.dtype}; give the snapshots of a "
                "run with the same model and number of shards"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            self.parameter.copy_(values)
        self.initialized = True
        lost = self.config.snapshot_every if restarted else 0
        self.version, self.epoch = state["version"] + lost, state["epoch"]
        self.counts.applied, self._played = state["applied"], state["played"]
        self.members = {
            worker: Member(incarnation, known)
            for worker, (incarnation, known) in state["members"].items()
        }
