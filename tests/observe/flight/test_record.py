"""The flight record of ranks that run: what is noted, what a killed rank leaves, what it costs in
bits (nothing)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops import comm, flight_record
from pyops.flight_record import FAILED, FINISHED, FlightRecord, recording
from pyops.observe import FlightError, explain, findings, read_records, watched
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only

GROUP = ("0", (0, 1))


def calls(folder: Path, rank: int) -> list[tuple[str, int, str]]:
    return [(e.op, e.nbytes, e.dtype) for e in read_records(folder)[rank].entries]


def training(rank: int, group: Any, folder: str) -> list[float]:
    """Some collectives of pyops and of torch, with and without a record: the sums are the same."""
    sums = []
    for noted in (True, False):
        with recording(folder) if noted else torch.no_grad():
            x = torch.full((6,), rank + 1.0)
            comm.all_reduce(x, group=group)
            work = comm.all_reduce(torch.ones(3), group=group, async_op=True)
            dist.broadcast(x, 0, group=group)
            dist.all_reduce(x)
            later = dist.all_reduce(x, async_op=True)
            later.wait()
            comm.agreement.gather(rank)
            work.wait()
            dist.barrier()
            if rank:
                dist.send(x, 0)
            else:
                dist.recv(x, 1)
            sums += x.tolist()
    return sums


def test_calls_of_pyops_and_of_torch_are_noted_once_and_change_nothing(world, tmp_path):
    first, second = world(2).run(training, str(tmp_path))
    assert first == second
    assert first[:6] == first[6:]
    common = [
        ("all_reduce", 24, "float32"),
        ("all_reduce", 12, "float32"),
        ("broadcast", 24, "float32"),
        ("all_reduce", 24, "float32"),
        ("all_reduce", 24, "float32"),
        ("all_gather_object", 0, ""),
        ("barrier", 0, ""),
    ]
    assert calls(tmp_path, 0) == [*common, ("recv", 24, "float32")]
    assert calls(tmp_path, 1) == [*common, ("send", 24, "float32")]
    records = read_records(tmp_path)
    assert all(e.state == FINISHED for r in records.values() for e in r.entries)
    assert "test_record.py" in records[0].entries[0].place
    assert records[0].entries[0].group.ranks == (0, 1)
    assert records[0].life == FINISHED
    assert findings(records) == []


def dies_or_hangs(rank: int, group: Any, folder: str) -> str:
    """Rank 1 is killed between two collectives; rank 0 says where all stand."""
    with recording(folder) as record:
        comm.all_reduce(torch.ones(2), group=group)
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(2))
        return str(record.path)


def test_a_killed_rank_leaves_its_record(tmp_path):
    first, second = spawn_ranks(2, dies_or_hangs, str(tmp_path))
    assert first.error is None
    assert second.exitcode == -signal.SIGKILL
    records = read_records(tmp_path)
    assert records[1].is_dead
    assert records[1].entries[-1].op == "all_reduce"
    assert records[0].entries[-1].state == FAILED
    assert not records[0].is_dead


def sleeps(rank: int, group: Any, folder: str) -> list[str]:
    """Rank 1 comes late by two seconds; both watch."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, message: logging.LogRecord) -> None:
            heard.append(message.getMessage())

    ear = Ear()
    logging.getLogger("pyops").addHandler(ear)
    with recording(folder) as record, watched(record, patience=0.5, look_every=0.1):
        if rank == 1:
            in_the_data()
        dist.all_reduce(torch.ones(2))
    logging.getLogger("pyops").removeHandler(ear)
    return heard


def in_the_data() -> None:
    time.sleep(1.5)


def test_a_hang_is_told_while_it_lasts_with_the_line_of_who_is_late(world, tmp_path):
    (told,), nothing = world(2).run(sleeps, str(tmp_path))
    assert nothing == []
    assert "rank 0 waits for rank 1 in all_reduce #1 (8 bytes of float32)" in told
    assert told.endswith("in_the_data")


def test_a_signal_asks_for_the_stacks(tmp_path):
    with recording(tmp_path, rank=0, size=1) as record, watched(record, look_every=0.05):
        os.kill(os.getpid(), signal.SIGUSR2)
        end = time.monotonic() + 10
        while not (tmp_path / "rank0.stacks").exists() and time.monotonic() < end:
            time.sleep(0.02)
    (read,) = read_records(tmp_path).values()
    assert "test_record.py" in read.stack


def test_only_the_last_calls_are_kept(tmp_path):
    record = FlightRecord(tmp_path, rank=1, size=2, entries=4)
    numbers = [record.begin("all_reduce", group=GROUP, nbytes=i) for i in range(7)]
    for number in numbers:
        record.finish(number)
    record.close()
    entries = read_records(tmp_path)[1].entries
    assert [e.sequence for e in entries] == [4, 5, 6, 7]
    assert all(e.state == FINISHED and e.ended >= e.begun for e in entries)
    assert record.oldest is None


def test_a_call_that_goes_on_ends_when_it_is_done(tmp_path):
    record = FlightRecord(tmp_path, rank=0, size=2)
    done: list[int] = []
    record.finish_later(record.begin("all_reduce", group=GROUP), lambda: bool(done))
    assert record.oldest is not None
    assert read_records(tmp_path)[0].entries[0].waits
    done.append(1)
    assert record.oldest is None
    assert not read_records(tmp_path)[0].entries[0].waits


def test_what_can_not_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(FlightError, match=r"has no rank\*.flight"):
        read_records(tmp_path)
    (tmp_path / "rank0.flight").write_bytes(b'{"entries": 4, "rank"')
    with pytest.raises(FlightError, match=r"rank0\.flight is no flight record, or cut off"):
        read_records(tmp_path)


def test_bad_numbers_are_refused_and_torch_is_as_before(tmp_path):
    before = dist.all_reduce
    with pytest.raises(ValueError, match="rank is 2; give one of 0 to 1"):
        FlightRecord(tmp_path, rank=2, size=2)
    with pytest.raises(ValueError, match="entries is 0"):
        FlightRecord(tmp_path, rank=0, size=2, entries=0)
    with recording(tmp_path, rank=0, size=1) as record:
        with pytest.raises(RuntimeError, match="is being written already"), recording(tmp_path):
            pass
        with pytest.raises(ValueError, match="patience is 0"), watched(record, patience=0):
            pass
    assert flight_record.active() is None
    assert dist.all_reduce is before


def test_the_text_names_each_rank(tmp_path):
    for rank in range(2):
        FlightRecord(tmp_path, rank=rank, size=2).begin("barrier", group=GROUP)
    text = explain(read_records(tmp_path))
    assert "2 of 2 ranks left a record" in text
    assert "rank 1 on" in text
    assert "in barrier #1" in text
