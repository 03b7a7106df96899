"""Which line of a program a call is noted at, and whose time counts as waited."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

import pyops
from pyops.flight_record import FlightRecord, user_frame, waiting
from pyops.observe import read_records

pytestmark = pytest.mark.cpu_only

ROOM = os.path.dirname(pyops.__file__) + os.sep
LIBRARY = os.path.dirname(threading.__file__) + os.sep + "made_up.py"


@pytest.fixture
def record(tmp_path: Path) -> FlightRecord:
    return FlightRecord(tmp_path, rank=0, size=1)


def test_two_calls_of_one_function_have_their_own_lines(record: FlightRecord) -> None:
    for _ in range(2):
        record.begin("barrier", group=("0", (0,)))
        record.begin("barrier", group=("0", (0,)))
    record.close()
    places = [entry.place.rpartition(" ")[0] for entry in read_records(record.folder)[0].entries]
    lines = [int(place.rpartition(":")[2]) for place in places]
    assert lines[0] + 1 == lines[1]
    assert lines[:2] == lines[2:]


def frame_of(*files: str) -> FrameType | None:
    """`user_frame` of a call through functions of these files, the outermost first."""
    namespace = {"ask": lambda: found.append(user_frame(sys._getframe(1)))}
    found: list[FrameType | None] = []
    call = "ask()"
    for file in reversed(files):
        exec(compile(f"def through():\n    {call}", file, "exec"), namespace)
        namespace[f"f{len(namespace)}"] = namespace["through"]
        call = f"f{len(namespace) - 1}()"
    thread = threading.Thread(target=namespace["through"])  # which has no frame of a test
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("/home/someone/train.py", ROOM + "zero/a.py", ROOM + "comm/b.py"), 0),
        ((LIBRARY, ROOM + "zero/a.py", LIBRARY, ROOM + "comm/b.py"), 1),
        ((LIBRARY, ROOM + "zero/a.py", ROOM + "zero/b.py", ROOM + "comm/c.py"), 2),
        (("/home/someone/train.py", "/home/someone/model.py", LIBRARY), 1),
        (("<string>", LIBRARY, ROOM + "comm/a.py"), None),
    ],
)
def test_the_innermost_line_of_the_user_or_else_of_the_room_that_communicates(files, expected):
    found = frame_of(*files)
    assert (found and found.f_code.co_filename) == (None if expected is None else files[expected])


def test_the_programs_own_thread_alone_waits(record: FlightRecord) -> None:
    told: list[bool] = []
    record.on_wait = told.append

    def wait() -> None:
        with waiting(record):
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert (record.waited, told) == (0.0, [])
    with pytest.raises(KeyError), waiting(record):
        time.sleep(0.02)
        raise KeyError
    assert record.waited >= 0.02
    assert told == [True, False]
    with waiting(None):
        pass
