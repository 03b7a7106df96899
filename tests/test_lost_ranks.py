"""A rank that dies as it comes to one of torch's own collectives: every other rank names it,
wherever pyops calls one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from pyops import failure, hub, mesh
from pyops.comm import CommunicationError, all_reduce
from pyops.comm.agreement import gather
from pyops.comm.broadcast import broadcast
from pyops.data_parallel import DataParallel
from pyops.elastic import make_control_group
from pyops.elastic.frozen.host_cache import CacheOptions, HostCache
from pyops.elastic.layout.process_groups import LayoutGroups
from pyops.elastic.layout.rank_layout import Layout
from pyops.flat.dtensor import Spread, placed_as
from pyops.models import GPT, GPTConfig
from pyops.optim import AdamW
from pyops.parallel.stages.staged_model import broadcast_logits
from pyops.precision import overflowed
from pyops.tensor_parallel.functional.regions import all_to_all
from pyops.train.setup.replicated import sum_over_ranks
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.grids import full
from tests.workers import Outcome, spawn_worlds

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

SIZE, VICTIM, TIMEOUT = 3, 1, 4.0
Group = dist.ProcessGroup


def _save(group: Group, folder: str) -> None:
    config = GPTConfig(
        vocab_size=12, sequence_length=4, num_layers=1, num_heads=SIZE, dim=6, hidden=6
    )
    hub.save(GPT(config, group=group, seed=1), Path(folder) / "saved", group=group)


def _replicas(group: Group, folder: str) -> None:
    make_elastic(
        networks.layers(2),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=6,
        seed=5,
        stages=1,
    )


def _cache(group: Group, folder: str) -> None:
    options = CacheOptions("on", lambda samples: (torch.ones(len(samples), 2), {}))
    HostCache(options, samples=4, held_out=0, control_group=group)._open(((2,), torch.float32))


def _placed(group: Group, folder: str) -> None:
    grid = DeviceMesh("cpu", list(range(SIZE)))
    mine = torch.ones(SIZE, 2)
    placed_as(
        DTensor.from_local(mine, grid, [Partial()]), DTensor.from_local(mine, grid, [Replicate()])
    )


def _logits(group: Group, folder: str) -> None:
    pipeline = SimpleNamespace(group=group, schedule=SimpleNamespace(rank_of=[0]))
    broadcast_logits(torch.ones(1, 3, 5), pipeline)  # type: ignore[arg-type]


def _exchange(group: Group, folder: str) -> None:
    all_to_all(torch.ones(SIZE, 2), group=group)


def _layout(group: Group, folder: str) -> None:
    LayoutGroups(Layout(SIZE, 1, SIZE, (0, 4)), control_group=group)


# The collective that the victim does not come to, and who calls it.
PLACES: dict[str, tuple[str, Callable[[Group, str], Any]]] = {
    "overflowed": ("all_reduce", lambda group, _: overflowed([torch.ones(3)], group=group)),
    "hub.save": ("gather", _save),
    "replicas of an elastic run": ("broadcast", _replicas),
    "norms of DTensors": (
        "all_reduce",
        lambda group, _: Spread(DeviceMesh("cpu", [0, 1, 2]), (0,)).sum_(torch.ones(3)),
    ),
    "a DTensor's gradient": ("DTensor.redistribute", _placed),
    "all_to_all": ("all_to_all_single", _exchange),
    "DataParallel": ("broadcast", lambda group, _: DataParallel(nn.Linear(2, 2), group=group)),
    "ZeroOptimizer": (
        "broadcast",
        lambda group, _: ZeroOptimizer(
            nn.Linear(2, 2), AdamW, ZeroConfig(stage=1), group=group, lr=0.1
        ),
    ),
    "broadcast": ("broadcast", lambda group, _: broadcast([torch.ones(2)], group=group)),
    "losses": ("all_reduce", lambda group, _: sum_over_ranks(torch.ones(2))),
    "logits": ("broadcast", _logits),
    "native all_reduce": (
        "all_reduce",
        lambda group, _: all_reduce(torch.ones(2), group=group, algorithm="native"),
    ),
    "message group": ("new_group", lambda group, _: make_control_group(patience=TIMEOUT)),
    "groups of a layout": ("new_group", _layout),
    "group of a host": ("new_group", _cache),
    "mesh": ("init_device_mesh", lambda group, _: mesh.Mesh(mesh.Axes(dp=2, tp=2))),
}


def _die(*args: Any, **kwargs: Any) -> None:
    os._exit(7)


def _lose_a_rank(
    rank: int, group: Group, place: str, folder: str
) -> tuple[str, tuple[int, ...], float]:
    failure.PATIENCE = 2.0
    distributed_c10d.default_pg_timeout = timedelta(
        seconds=TIMEOUT
    )  # which the groups of a mesh have
    name, call = PLACES[place]
    dist.barrier(group)
    if rank == VICTIM:
        holder = {"DTensor.redistribute": DTensor, "init_device_mesh": mesh}.get(name, dist)
        setattr(holder, name.rpartition(".")[2], _die)
    begin = time.monotonic()
    try:
        call(group, folder)
        gather(
            rank, group=group
        )  # a rank may have had all that it waits for, and hears of it at what comes next
    except CommunicationError as error:
        return str(error), error.ranks, time.monotonic() - begin
    raise AssertionError("nothing was raised")


OF_THREE = [place for place in PLACES if place != "mesh"]


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (3, OF_THREE[:3]),
        *(full(3, OF_THREE[i : i + 3]) for i in (3, 6, 9, 12)),
        full(4, ["mesh"]),
    ],
    ids=str,
)
def test_every_other_rank_names_the_one_that_died(tmp_path, size, places):
    """In three worlds at a time."""
    cases = [(place, str(tmp_path)) for place in places]
    worlds = spawn_worlds(size, _lose_a_rank, cases, timeout=40, group_timeout=TIMEOUT)
    for place, outcomes in zip(places, worlds, strict=True):
        check(place, outcomes)


def check(place: str, outcomes: list[Outcome]) -> None:
    assert outcomes[VICTIM].exitcode == 7, place
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            assert outcome.error is None, (place, outcome.error)
            message, ranks, took = outcome.result
            assert ranks == (VICTIM,), (place, message)
            assert f"rank {VICTIM} died or stalled" in message
            assert took < TIMEOUT + 8
