"""Which processes a supervisor replaces, and the code with which it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping

import pytest

from pyops.healing.quorum import Quorum, QuorumConfig
from pyops.launch import supervisor
from pyops.launch.supervisor import Supervisor

pytestmark = pytest.mark.cpu_only

KILLED = -signal.SIGKILL


class Script:
    """A process that ends with a code when it is looked at; None: it runs until it is killed."""

    def __init__(self, pid: int, code: int | None, before: Callable[[], None]) -> None:
        self.pid, self._code, self._before = pid, code, before
        self.signals: list[int] = []

    def poll(self) -> int | None:
        self._before()
        return KILLED if signal.SIGKILL in self.signals else self._code

    def send_signal(self, number: int, /) -> None:
        self.signals.append(number)


class Ranks:
    """Starts the processes of a run: codes[rank] are those of the processes of that rank."""

    def __init__(self, *codes: list[int | None]) -> None:
        self._codes = [list(each) for each in codes]
        self.started: list[Script] = []
        self.variables: list[Mapping[str, str]] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, variables: Mapping[str, str]) -> Script:
        code = self._codes[int(variables["RANK"])].pop(0)
        process = Script(100 + len(self.started), code, lambda: self.before())
        self.started.append(process)
        self.variables.append(variables)
        return process


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(supervisor, "GRACE", 0.0)


def run(ranks: Ranks, *, size: int, most_idle: int = 2) -> tuple[int, list[str]]:
    told: list[str] = []
    return Supervisor(ranks, ranks=size, most_idle=most_idle, tell=told.append).run(), told


def test_a_process_that_dies_is_replaced_as_the_same_rank() -> None:
    ranks = Ranks([0], [KILLED, 1, 0])
    # Rank 0 ends when the others have: who is lost after that is not replaced.
    ranks.before = lambda: setattr(
        ranks.started[0], "_code", 0 if len(ranks.started) == 4 else None
    )
    code, told = run(ranks, size=2)
    assert code == 0
    assert [each["RANK"] for each in ranks.variables] == ["0", "1", "1", "1"]
    assert len({each["MASTER_PORT"] for each in ranks.variables}) == 1
    assert {each["WORLD_SIZE"] for each in ranks.variables} == {"2"}
    assert [line.split(" after")[0] for line in told] == [
        "rank 1 (process 101) died of SIGKILL",
        "rank 1 (process 102) died of an error (exit code 1)",
    ]


def test_a_rank_that_ends_by_itself_ends_the_others() -> None:
    code, told = run(Ranks([None], [2]), size=2)
    assert code == 2
    assert told == [
        "rank 0 (process 100) died of SIGKILL: not replaced, since other ranks have ended"
    ]


def test_replacements_without_a_step_between_are_counted() -> None:
    code, told = run(Ranks([KILLED] * 4), size=1, most_idle=2)
    assert code == 1
    assert len(told) == 3
    assert "not replaced, since 2 replacements came without a step between" in told[-1]


def test_replacements_with_steps_between_are_not_counted() -> None:
    ranks = Ranks([*[KILLED] * 5, 0])

    def step_taken() -> None:
        port = int(ranks.variables[0]["MASTER_PORT"])
        store = supervisor.dist.TCPStore("127.0.0.1", port, is_master=False)
        supervisor.dist.PrefixStore("pyops/healing", store).set("steps", str(len(ranks.started)))

    ranks.before = step_taken
    code, told = run(ranks, size=1, most_idle=1)
    assert code == 0
    assert len(told) == 5


def test_a_signal_goes_to_the_ranks_and_ends_replacing() -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    ranks = Ranks([KILLED])
    ranks.before = lambda: signal.raise_signal(signal.SIGTERM)
    code, told = run(ranks, size=1)
    assert code == 1
    assert ranks.started[0].signals == [signal.SIGTERM]
    assert told == [
        "rank 0 (process 100) died of SIGKILL: not replaced, since SIGTERM asked the run to end"
    ]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_progress_that_is_counted_is_that_of_the_replicas() -> None:
    store = supervisor.dist.HashStore()
    assert supervisor.noted_steps(store) == 0
    here = Quorum(store, QuorumConfig(lease=0.2))
    here.note_progress(7)
    here.leave()
    assert supervisor.noted_steps(store) == 7
