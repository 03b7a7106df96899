"""The two logs of calls, that of the kernels and that of Python: entries of the same calls."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pyops
from pyops.flight_record import ENTRY, FAILED, FINISHED
from pyops.flight_record.call_log import RUNNING, CallLog, PythonCallLog, call_log
from pyops.flight_record.frames import user_frame
from pyops.ops.library import native

pytestmark = pytest.mark.cpu_only

HEADER, ENTRIES = 4096, 4
ROOM = os.path.dirname(pyops.__file__) + os.sep
LIBRARY = os.path.dirname(os.__file__) + os.sep + "made_up.py"
KINDS = [
    pytest.param(PythonCallLog, id="Python"),
    pytest.param(
        call_log, id="kernels", marks=pytest.mark.skipif(native() is None, reason="no kernels")
    ),
]


class Log:
    """A log, and its entries as they stand in its memory."""

    def __init__(self, kind: Any) -> None:
        self.memory = mmap.mmap(-1, HEADER + ENTRIES * ENTRY.size)
        self.log: CallLog = kind(self.memory, HEADER, ENTRIES)

    def entry(self, place: int) -> tuple[Any, ...]:
        texts = ENTRY.unpack_from(self.memory, HEADER + place * ENTRY.size)
        return tuple(x.rstrip(b"\0").decode() if isinstance(x, bytes) else x for x in texts)


@pytest.fixture(params=KINDS)
def log(request: pytest.FixtureRequest) -> Log:
    return Log(request.param)


def here() -> FrameType:
    return sys._getframe(1)


def test_what_an_entry_has(log: Log) -> None:
    before = time.time()
    line = here().f_lineno + 1
    index = log.log.begin(3, "all_reduce", -1, 1 << 40, "bfloat16", "gradients", here())
    found = log.entry(0)
    assert found[:2] == (1, 1)
    assert before - 0.1 < found[2] < time.time() + 0.1
    assert found[3] == 0.0
    assert found[4:8] == (3, -1, 1 << 40, RUNNING)
    assert found[8:11] == ("all_reduce", "bfloat16", "gradients")
    assert found[11] == f"observe/flight/test_call_log.py:{line} test_what_an_entry_has"
    oldest = log.log.oldest()
    assert oldest is not None
    assert abs(time.monotonic() - oldest) < 60
    log.log.finish(index, False)
    assert log.entry(0)[:3] == found[:3]
    assert found[2] <= log.entry(0)[3] <= time.time() + 0.1
    assert log.entry(0)[7] == FINISHED
    assert log.log.oldest() is None


def test_texts_that_are_too_long_are_cut(log: Log) -> None:
    long = "a" * 300
    namespace: dict[str, Any] = {"here": here}
    exec(compile(f"def {long}():\n    return here()", "/home/someone/train.py", "exec"), namespace)
    log.log.begin(0, long, -1, 0, long, long, namespace[long]())
    log.log.begin(0, "b", -1, 0, "", "c", here())
    assert log.entry(0)[8:] == ("a" * 24, "a" * 12, "a" * 40, "a" * 115)
    assert log.entry(1)[8:11] == ("b", "", "c")
    for _ in range(ENTRIES):  # the shorter texts of later calls stand where the long ones stood
        log.log.begin(0, "b", -1, 0, "d", "c", here())
    assert log.entry(0)[8:11] == ("b", "d", "c")


def test_calls_of_a_group_and_messages_to_a_peer_are_counted_apart(log: Log) -> None:
    calls = [(0, "all_reduce", -1), (0, "barrier", -1), (1, "barrier", -1), (0, "send", 2)]
    calls += [(0, "receive", 2), (0, "send", 2), (0, "send", 1), (0, "barrier", -1)]
    counts = []
    for number, (group, op, peer) in enumerate(calls):
        log.log.begin(group, op, peer, 0, "", "", here())
        counts.append(log.entry(number % ENTRIES)[1])
    assert counts == [1, 2, 1, 1, 1, 2, 1, 3]


def test_an_end_is_noted_once_and_not_in_the_place_of_a_later_call(log: Log) -> None:
    begun = [log.log.begin(0, "barrier", -1, 0, "", "", here()) for _ in range(ENTRIES + 1)]
    log.log.finish(begun[0], True)  # its place is that of the last call
    assert log.entry(0)[7] == RUNNING
    assert log.entry(0)[3] == 0.0
    log.log.finish(begun[1], True)
    log.log.finish(begun[1], False)
    assert log.entry(1)[7] == FAILED
    log.log.finish(begun[-1], False)
    assert log.entry(0)[7] == FINISHED
    oldest, log_again = log.log.oldest(), log.log
    for index in begun[2:-1]:
        assert oldest is not None
        log_again.finish(index, False)
    assert log_again.oldest() is None


def test_a_call_without_a_place_is_the_oldest_until_it_ends(log: Log) -> None:
    begun = [log.log.begin(0, "barrier", -1, 0, "", "", here()) for _ in range(ENTRIES)]
    first = log.log.oldest()
    assert first is not None
    for index in begun[1:]:
        log.log.finish(index, False)
    last = log.log.begin(0, "barrier", -1, 0, "", "", here())  # in the place of the first
    assert log.log.oldest() == pytest.approx(first, abs=1e-6)
    log.log.finish(begun[0], False)
    later = log.log.oldest()
    assert later is not None
    assert later > first
    log.log.finish(last, False)
    assert log.log.oldest() is None


def test_a_kind_notes_what_begin_notes(log: Log) -> None:
    begin = log.log.kind(1, "all_reduce", -1, "bfloat16", "gradients")
    first, second = here().f_lineno + 1, here().f_lineno + 2
    assert begin(1 << 40) == 1
    assert begin(6) == 2
    log.log.begin(1, "all_reduce", -1, 6, "bfloat16", "gradients", here())
    begin(7)
    said = f"observe/flight/test_call_log.py:%s {here().f_code.co_name}"
    assert log.entry(0)[4:11] == (1, -1, 1 << 40, RUNNING, "all_reduce", "bfloat16", "gradients")
    assert [log.entry(at)[11] for at in (0, 1, 3)] == [
        said % line for line in (first, second, second + 2)
    ]
    assert [log.entry(at)[1] for at in range(4)] == [1, 2, 3, 4]
    assert [log.entry(at)[6] for at in range(4)] == [1 << 40, 6, 6, 7]


def test_what_a_call_calls_is_not_noted(log: Log) -> None:
    begin, run = log.log.kind(0, "barrier", -1, "", ""), log.log.runner()
    found: list[int] = []

    def ask() -> str:
        found.append(begin(0))
        return "done"

    assert run(begin(0), ask) == "done"
    other = threading.Thread(target=run, args=(0, lambda: run(0, ask)))
    other.start()
    other.join()
    log.log.shift(1)
    ask()
    log.log.shift(-1)
    assert found == [0, 0, 0]
    assert log.entry(0)[7] == FINISHED
    assert not log.log.inside()
    index = begin(0)
    with pytest.raises(KeyError):
        run(index, lambda: {}["missing"])
    assert (index, log.entry(1)[7]) == (2, FAILED)
    assert not log.log.inside()
    assert log.log.oldest() is None


def call_through(files: tuple[str, ...]) -> FrameType:
    """The frame of a call through functions of these files, the outermost first."""
    namespace: dict[str, Any] = {"here": here}
    call = "here()"
    for number, file in enumerate(reversed(files)):
        exec(compile(f"def f{number}():\n    return {call}", file, "exec"), namespace)
        call = f"f{number}()"
    found: FrameType = namespace[call.removesuffix("()")]()
    return found


@pytest.mark.parametrize(
    "files",
    [
        ("/home/someone/train.py", ROOM + "zero/a.py", ROOM + "comm/b.py"),
        (LIBRARY, ROOM + "zero/a.py", ROOM + "zero/b.py", LIBRARY, ROOM + "comm/c.py"),
        ("/home/someone/train.py", "/home/someone/model.py", LIBRARY),
        ("<string>", LIBRARY, ROOM + "comm/a.py"),
    ],
)
def test_the_place_is_that_of_the_users_frame(log: Log, files: tuple[str, ...]) -> None:
    frame = call_through(files)
    expected = user_frame(frame)
    assert expected is not None
    for _ in range(2):  # looked for, and known
        log.log.begin(0, "barrier", -1, 0, "", "", frame)
    name = Path(expected.f_code.co_filename).name
    for place in (0, 1):
        said = f"/{name}:{expected.f_lineno} {expected.f_code.co_name}"
        assert log.entry(place)[11].endswith(said)


def test_memory_that_is_too_short_is_refused() -> None:
    module = native()
    if module is None:
        pytest.skip("no kernels")
    with pytest.raises(ValueError, match="no room for its entries"):
        call_log(mmap.mmap(-1, HEADER), HEADER, 1)
