"""Shards and replicas over real sessions, in threads of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pyops.comm import BF16, Int8
from pyops.comm.compression.codec import Codec
from pyops.failure import CommunicationError
from pyops.parameter_server import (
    ConnectConfig,
    DownpourConfig,
    ParameterShard,
    ServerConfig,
    ShardConfig,
    connect,
    serve,
)
from pyops.parameter_server.messages import Kind, Request
from pyops.parameter_server.serving import _Replica, _Serving
from pyops.parameter_server.sessions.line import Line
from pyops.parameter_server.sessions.session import Session, Tag
from tests.parameter_server.replicas import adagrad, gradient, model, run, sgd, uneven
from tests.parameter_server.shard_threads import Served, replica, served, tcp_store

pytestmark = pytest.mark.cpu_only


def together(store, count: int, steps: int, **options) -> list:
    """Replicas in threads; their clients."""
    clients: dict[int, object] = {}

    def live(worker: int) -> None:
        clients[worker] = replica(store, worker, steps, seconds=0.0005, **options)

    threads = [threading.Thread(target=live, args=(w,)) for w in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [clients[w] for w in range(count)]


def test_a_replica_over_sessions_is_that_of_virtual_time_bit_for_bit():
    config = DownpourConfig(fetch_delay=0)
    with served(adagrad(0.05), shards=2) as shards:
        client = replica(shards.store, 0, 5, shards=2, config=config)
    virtual = run(uneven(1, steps=5), adagrad(0.05), shards=2, fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)
    assert [report.version for report in shards.reports.values()] == [5, 5]


@pytest.mark.full  # its cut stands in test_virtual_time.py; here the order is the threads' own
def test_a_recorded_run_of_threads_is_replayed_in_virtual_time_bit_for_bit(tmp_path: Path):
    config = ShardConfig(record=True)
    with served(adagrad(0.05), config=config, server=ServerConfig(snapshots=tmp_path)) as shards:
        together(shards.store, 3, 6)
    log = shards.reports[0].log
    assert sum(kind == "push" for kind, _, _ in log) == 18
    again = run(uneven(3, steps=6), adagrad(0.05), shards=2, shard_config=ShardConfig(replay=log))
    kept = torch.load(tmp_path / "shard-0.pt", weights_only=True)["state"]["parameters"]
    assert torch.equal(again.parameters(), kept)


def test_codecs_travel_over_sessions():
    config = DownpourConfig(push_codec=Int8(), fetch_codec=Int8(), fetch_delay=0)
    with served(sgd(0.05)) as shards:
        client = replica(shards.store, 0, 6, config=config)
    virtual = run(
        uneven(1, steps=6), sgd(0.05), fetch_delay=0, push_codec=Int8(), fetch_codec=Int8()
    )
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)
    assert shards.reports[0].version == 6


def test_another_model_is_refused_and_stays_as_it_was():
    with served(sgd(0.05)) as shards:
        replica(shards.store, 0, 1)
        other = nn.Linear(9, 18)
        before = other.weight.data_ptr()
        with pytest.raises(ValueError, match=r"worker 1 and shard 0 differ .* start all with"):
            connect(other, shards.store, worker=1)
        assert other.weight.data_ptr() == before
        with pytest.raises(ValueError, match=r"knows no codec .*ServerConfig\(codecs="):
            config = DownpourConfig(push_codec=Int8(block=128))
            connect(model(), shards.store, worker=1, config=config)


def test_an_old_incarnation_is_refused_by_number():
    with served(sgd(0.05)) as shards:
        waits = ConnectConfig(beat_every=0.2)
        module = model()
        old = connect(module, shards.store, worker=4, patience=waits)
        new = connect(model(), shards.store, worker=4, patience=waits)
        gradient(module, 4, 0)
        with pytest.raises(CommunicationError, match="worker 4: shard 0 refused incarnation 1"):
            for _ in range(3):
                old.step()
        old.links.abandon()
        assert new.incarnation == 2
        new.close()
    assert shards.reports[0].version == 0
    assert shards.reports[0].counts.refused["OLD_INCARNATION"] >= 1


def test_a_replica_without_a_sign_of_life_is_lost_and_holds_up_nobody():
    config = ShardConfig(max_staleness=0)
    with served(sgd(0.05), config=config, server=ServerConfig(lease=2.0)) as shards:
        silent = connect(model(), shards.store, worker=1, patience=ConnectConfig(beat_every=1000.0))
        replica(shards.store, 0, 4, config=DownpourConfig(fetch_delay=0))
        silent.links.abandon()
    assert shards.reports[0].version == 4
    assert shards.reports[0].counts.lost_members == 1


def test_the_end_of_an_old_session_loses_no_replica_that_has_connected_again():
    serving = _Serving(tcp_store(), sgd, (0, 1), None, ServerConfig())
    held = serving._held = ParameterShard(3, sgd)
    old, new = _Replica(2, 7), _Replica(2, 7)
    serving._replicas = [old]
    held.join(2, 7)
    serving._replicas.append(new)
    held.join(2, 7)
    serving._lost(old)
    assert held.members[2].live
    assert held.counts.lost_members == 0
    serving._lost(new)
    assert not held.members[2].live
    assert held.counts.lost_members == 1


@pytest.mark.parametrize("codec", [None, BF16()], ids=["plain", "bf16"])
def test_a_shard_that_is_started_again_goes_on_from_its_snapshot(
    codec: Codec | None, tmp_path: Path
):
    """With a codec fetches are differences, but the first one from another start of the shard."""
    server = ServerConfig(snapshots=tmp_path)
    options = {"config": ShardConfig(snapshot_every=3), "server": server}
    store, versions = tcp_store(), []
    first = Served(store, adagrad(0.05), 1, **options)
    module = model()
    client = connect(
        module,
        store,
        worker=0,
        config=DownpourConfig(fetch_delay=0, fetch_codec=codec),
        patience=ConnectConfig(beat_every=0.2),
    )
    for step in range(10):
        gradient(module, 0, step)
        if step == 5:
            first.stop()
            second = Served(store, adagrad(0.05), 1, **options)
        client.step()
        versions.append(client.versions[0])
    client.close()
    second.stop()
    assert versions == sorted(versions)
    report = second.reports[0]
    assert (report.epoch, report.counts.applied, report.counts.lost_pushes) == (2, 10, 0)
    plain = run(uneven(1, steps=10), adagrad(0.05), fetch_delay=0).clients[0].buffer.data
    if codec is None:
        assert torch.equal(client.buffer.data, plain)
    assert (client.buffer.data - plain).norm() < 0.05 * plain.norm()


def test_a_shard_that_was_replaced_leaves_the_snapshot_of_the_next_one_alone(tmp_path: Path):
    store, server = tcp_store(), ServerConfig(snapshots=tmp_path)
    first, second = (_Serving(store, sgd(0.1), (0, 1), None, server) for _ in range(2))
    for number, serving in enumerate((first, second)):
        serving.begin(None)
        serving._digest = "the model"
        serving._held = ParameterShard(3, sgd(0.1))
        serving._held.initialize(torch.full((3,), float(number)))
    second.end()
    kept = (tmp_path / "shard-0.pt").read_bytes()
    first.end()
    assert (tmp_path / "shard-0.pt").read_bytes() == kept


def test_a_damaged_snapshot_is_named(tmp_path: Path):
    (tmp_path / "shard-0.pt").write_bytes(b"no snapshot")
    with pytest.raises(ValueError, match=r"shard-0\.pt can't be read"):
        serve(tcp_store(), sgd(0.1), server=ServerConfig(snapshots=tmp_path))


def test_a_second_process_for_a_shard_ends_the_first():
    store = tcp_store()
    first = Served(store, sgd(0.1), 1)
    store.get("pyops/parameter_server/0/epoch")  # waits: the second process is the later one
    second = Served(store, sgd(0.1), 1)
    first.threads[0].join(60)
    assert "another process serves it since" in str(first.errors[0])
    second.stop()
    assert not second.errors


def test_no_shard_is_an_error_that_names_it():
    with pytest.raises(CommunicationError, match=r"shard 0 did not answer within 0\.2 seconds"):
        connect(model(), tcp_store(), worker=0, patience=ConnectConfig(patience=0.2))


def test_no_thread_outlives_a_shard_and_a_replica_that_have_ended(monkeypatch: pytest.MonkeyPatch):
    """One that came back from a wait in C++ while the interpreter ends would abort the process."""
    received = Session.receive

    def late(self: Session, whole: torch.Tensor, tag: Tag, **options) -> torch.Tensor:
        try:
            return received(self, whole, tag, **options)
        except RuntimeError:
            time.sleep(1.5 if tag == Tag.PUSH else 0.3)  # the pushes' thread is the last one
            raise

    monkeypatch.setattr(Session, "receive", late)
    before = set(threading.enumerate())
    with served(adagrad(0.05)) as shards:
        often = ConnectConfig(beat_every=0.001)
        leaves, stays = (
            connect(model(), shards.store, worker=worker, patience=often) for worker in range(2)
        )
        beat = leaves.links.lines[0].watch
        leaves.links.lines[0].watch = lambda store: (beat(store), time.sleep(0.3))
        time.sleep(0.1)
        leaves.close()
        beats = leaves.links._beats.is_alive()
    left = set(threading.enumerate()) - before - {stays.links._beats}
    pools = {t for t in left if t.name.startswith("ThreadPoolExecutor")}  # of `stays`
    stays.links.abandon()
    assert not beats
    assert left == pools, left


NEVER_CLOSES = """
import atexit, threading

before = threading.current_thread()


def told():  # registered first, called last
    print(sorted(t.name for t in threading.enumerate() if t is not before), flush=True)


atexit.register(told)

from pyops.parameter_server import ConnectConfig, HostedShard, connect, stop
from tests.parameter_server.replicas import adagrad, gradient, model
from tests.parameter_server.shard_threads import tcp_store

store = tcp_store()
shard = HostedShard(store, adagrad(0.05))
client = connect(model(), store, worker=0, patience=ConnectConfig(beat_every=0.0001))
gradient(client.model, 0, 0)
client.step()
client.settle()
stop(store)
shard.join()
print(client.links._beats.is_alive(), flush=True)
"""


def test_a_replica_that_is_never_closed_leaves_no_thread_when_the_interpreter_ends():
    """Its signs of life would come back from the store to an interpreter that is gone, and abort
    the process."""
    run = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSES], capture_output=True, text=True, timeout=240
    )
    assert (run.returncode, run.stdout.splitlines()) == (0, ["True", "[]"]), run.stderr


def test_a_fetch_of_the_same_step_is_asked_for_before_the_push_is_answered(
    monkeypatch: pytest.MonkeyPatch,
):
    """And answered behind it: pushes are held back until the shard knows of the fetch."""
    asked, ready, push = threading.Event(), ParameterShard.ready, Line.push

    def asking(shard: ParameterShard, request: Request) -> bool:
        found = ready(shard, request)
        if request.kind == Kind.FETCH and request.after > 0:
            asked.set()
        return found

    def held_back(line: Line, request: Request, whole: Tensor | None) -> Tensor:
        assert asked.wait(30), "the fetch is not asked for, or not behind the push"
        asked.clear()
        return push(line, request, whole)

    monkeypatch.setattr(ParameterShard, "ready", asking)
    monkeypatch.setattr(Line, "push", held_back)
    with served(adagrad(0.05)) as shards:
        client = replica(shards.store, 0, 4, config=DownpourConfig(fetch_delay=0))
    virtual = run(uneven(1, steps=4), adagrad(0.05), fetch_delay=0)
    assert torch.equal(client.buffer.data, virtual.clients[0].buffer.data)
    assert client.versions == [4]
