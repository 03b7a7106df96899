"""coordinate: a coordinator whose shards and workers are processes of their own.

    store      term          "1:4": the first term, led by coordinator 4
               1/command/7   "turn", coefficients          1/answer/7/0, 1/answer/7/1     shards
               1/task/2/9    evaluation, unit              1/done/2/9  loss               worker 2
               1/beat/2      a sign of life

Small things go through the store; parameters and gradients travel between workers and shards, and
past the coordinator. A term ends where a shard has been started again, or another coordinator takes
over: what was ordered in it is void, and workers join the next one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.failure import CommunicationError
from pyops.parameter_server.config import check_number
from pyops.parameter_server.sessions.session import own_connection
from pyops.parameter_server.vectors import layout_digest
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.portions import Portions
from pyops.sandblaster.recovery import EVALUATIONS, LOOK, RecoveringCoordinator, Term
from pyops.sandblaster.tree_sum import TreeSum

__all__ = [
    "RemoteBatch",
    "RemoteShards",
    "agree",
    "coordinate",
    "notes",
    "stop",
    "waited",
]

POLL, MOST = 2e-4, 5e-3  # seconds from one look for a note to the next
STOP = "stop"


def notes(store: dist.Store) -> dist.Store:
    """Where coordinator, shards and workers leave notes for each other: a connection of its own."""
    return dist.PrefixStore("pyops/sandblaster", own_connection(store))


def stop(store: dist.Store) -> None:
    """Tell all shards and workers that meet in `store` to end. Workers' models have the parameters
    that the run arrived at then."""
    notes(store).set(STOP, "1")


def waited(
    store: dist.Store, key: str, *, seconds: float, look: Callable[[], object] = lambda: None
) -> bool:
    """Wait for a note; False where it does not come in time, or all are told to end.

    Args:
        store: As of `notes`.
        key: The note.
        seconds: How long.
        look: Called now and then; raises where waiting is no use any more.
    """
    deadline, pause = time.monotonic() + seconds, POLL
    looked = 0.0
    while not store.check([key]):
        if time.monotonic() > deadline or store.check([STOP]):
            return bool(store.check([key]))
        if time.monotonic() - looked > LOOK:
            look()
            looked = time.monotonic()
        time.sleep(pause)
        pause = min(1.2 * pause, MOST)
    return True


def agree(
    store: dist.Store, model: nn.Module | None, shards: int, config: SandblasterConfig
) -> None:
    """ValueError where another process of the run has other options or another model.

    Args:
        store: As of `notes`.
        model: None: of a process that has none.
        shards: How many there are.
        config: The run's options.
    """
    given = {"options": json.dumps([shards, asdict(config)])}
    if model is not None:
        given["model"] = hashlib.sha256(layout_digest(model, shards=shards).encode()).hexdigest()
    for name, text in given.items():
        found = store.compare_set(f"agreed/{name}", "", text).decode()
        if found != text:
            raise ValueError(
                f"the {name} of this process differ from those of another one of the run "
                f"({text} and {found}); start all with the same model, shards and config"
            )


class RemoteShards:
    """The shards of other processes; see `Shards`.

    Args:
        store: As of `notes`.
        shards: How many there are.
        patience: Seconds in which a shard has to answer.
        term: The coordinator's.
    """

    def __init__(self, store: dist.Store, *, shards: int, patience: float, term: Term) -> None:
        self._store, self._shards, self._patience = store, shards, patience
        self._term = term
        self._turn = 0

    def begin_term(self) -> None:
        """Count commands from 1 again."""
        self._turn = 0

    def call(self, operation: str, *arguments: Any) -> list[Any]:
        """See `Shards.call`.

        Raises:
            CommunicationError: A shard does not answer, or could not do it.
        """
        self._turn += 1
        term = self._term.number
        command = f"{term}/command/{self._turn}"
        self._store.set(command, json.dumps([operation, arguments]))
        keys = [f"{term}/answer/{self._turn}/{shard}" for shard in range(self._shards)]
        answers = []
        for shard, key in enumerate(keys):
            if not waited(self._store, key, seconds=self._patience, look=self._term.look):
                raise CommunicationError(
                    f"shard {shard} of {self._shards} has not answered {operation!r} within "
                    f"{self._patience:g} s; start it again with its folder of snapshots, or all "
                    "shards anew, from parameters that are saved"
                )
            answer = json.loads(self._store.get(key))
            if "error" in answer:
                raise CommunicationError(f"shard {shard}: {operation}: {answer['error']}")
            answers.append(answer["found"])
        self._term.look()  # an answer may be that of a shard that was started again since
        for key in (command, *keys):
            self._store.delete_key(key)
        return answers


@dataclass
class _Member:
    """What the coordinator keeps of a worker."""

    turn: int = 0
    """The number of its last task."""
    task: tuple[int, int] | None = None
    """(evaluation, unit) that it computes."""
    beat: bytes = b""
    since: float = 0.0
    lost: bool = False


class RemoteBatch:
    """Passes over the batch by workers of other processes, which may come and die.

    Args:
        store: As of `notes`.
        config: How the batch is cut.
        lease: Seconds without a sign of life after which a worker is lost.
        patience: Seconds that the coordinator waits for a worker where there is none.
        term: The coordinator's.

    Attributes:
        again: Units that were handed out more than once.
        lost: Workers that were lost.
    """

    def __init__(
        self,
        store: dist.Store,
        config: SandblasterConfig,
        *,
        lease: float,
        patience: float,
        term: Term,
    ) -> None:
        self._store, self._config = store, config
        self._lease, self._patience = lease, patience
        self._term = term
        self._looked = self._looked_at_term = 0.0
        self.again = self.lost = 0
        self.begin_term()

    def begin_term(self) -> None:
        """Begin without workers: those that live join the term."""
        self._members: list[_Member] = []
        self._evaluation = self._term.number * EVALUATIONS

    def __call__(self) -> float:
        """All portions, at the shards' trial point; the sum of losses.

        Raises:
            CommunicationError: No worker is left.
        """
        self._evaluation += 1
        config = self._config
        portions = Portions(config.units, backups=config.backups)
        losses = TreeSum(config.portions)
        alive = time.monotonic()
        while not portions.over:
            moved = self._greet() + self._collect(portions, losses) + self._deal(portions)
            self._look_for_life(portions)
            if not moved and time.monotonic() - self._looked_at_term > LOOK:
                self._term.look()
                self._looked_at_term = time.monotonic()
            if moved or any(each.task and not each.lost for each in self._members):
                alive = time.monotonic()
            elif time.monotonic() - alive > self._patience:
                raise CommunicationError(
                    f"portions are left and no worker has come for {self._patience:g} s "
                    f"({self.lost} were lost); start others: they join where the run stands"
                )
            if not moved:
                time.sleep(POLL)
        self.again += portions.again
        return float(losses.total)

    def _greet(self) -> int:
        joined = int(self._store.add(f"{self._term.number}/workers", 0))
        new = joined - len(self._members)
        self._members += [_Member(since=time.monotonic()) for _ in range(new)]
        return new

    def _collect(self, portions: Portions, losses: TreeSum) -> int:
        """Take up what workers have done."""
        moved = 0
        for number, member in enumerate(self._members):
            key = f"{self._term.number}/done/{number}/{member.turn}"
            if member.task is None or not self._store.check([key]):
                continue
            loss = float.fromhex(self._store.get(key).decode())
            self._store.delete_key(key)
            evaluation, unit = member.task
            member.task, member.lost, member.since = None, False, time.monotonic()
            if evaluation == self._evaluation and portions.finish(unit):
                term = torch.tensor([loss], dtype=torch.float64, device="cpu")
                losses.add(term, index=unit, level=self._config.level)
            moved += 1
        return moved

    def _deal(self, portions: Portions) -> int:
        """Give free workers something to do."""
        moved = 0
        for number, member in enumerate(self._members):
            if member.task is not None or member.lost:
                continue
            unit = portions.take(number)
            if unit is None:
                continue
            member.turn, member.task = member.turn + 1, (self._evaluation, unit)
            task = f"{self._term.number}/task/{number}/{member.turn}"
            self._store.set(task, json.dumps(member.task))
            moved += 1
        return moved

    def _look_for_life(self, portions: Portions) -> None:
        now = time.monotonic()
        if now - self._looked < self._lease / 8:
            return
        self._looked = now
        for number, member in enumerate(self._members):
            key = f"{self._term.number}/beat/{number}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != member.beat:
                member.beat, member.since, member.lost = beat, now, False
            elif now - member.since > self._lease and not member.lost:
                member.lost = True
                self.lost += 1
                portions.lose(number)


def coordinate(
    store: dist.Store,
    *,
    shards: int,
    config: SandblasterConfig,
    lease: float = 10.0,
    patience: float = 60.0,
    save_every: int = 1,
    take_over: bool = False,
) -> RecoveringCoordinator:
    """A coordinator of shards (`serve`) and workers (`work`) in other processes. Call its `run`,
    as often as it takes, then its `finish`, then `stop(store)`.

    Args:
        store: Where all meet, such as a TCPStore that another process serves.
        shards: How many there are.
        config: The run's options, the same in all processes.
        lease: Seconds without a sign of life after which a worker is lost.
        patience: Seconds that are waited for a shard's answer, and for a worker where none is left.
        save_every: Iterations from one snapshot of the shards that have a folder for them to the
            next.
        take_over: Whether this coordinator replaces one that has died. It goes on from the shards'
            last snapshot, and the other one, where it lives, ends with a CommunicationError.

    Raises:
        ValueError: For other options than those of the other processes, or where the run has a
            coordinator.
    """
    own: Sequence[tuple[str, float]] = (("lease", lease), ("patience", patience))
    for name, value in own:
        if not value > 0:
            raise ValueError(f"{name} is {value!r}; give seconds, above 0")
    place = notes(store)
    check_number(save_every, name="save_every", least=1)
    agree(place, None, shards, config)
    term = Term(place, shards=shards, take_over=take_over)
    found = RemoteShards(place, shards=shards, patience=patience, term=term)
    batch = RemoteBatch(notes(store), config, lease=lease, patience=patience, term=term)

    def begin_term() -> None:
        term.begin()
        found.begin_term()
        batch.begin_term()

    return RecoveringCoordinator(found, batch, config, begin_term=begin_term, save_every=save_every)
