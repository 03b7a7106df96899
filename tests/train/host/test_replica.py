"""What a rank whose dead neighbors are replaced keeps of the states that it saves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.config import HealingConfig
from pyops.launch.supervisor import STARTED
from pyops.train.host.replica import RunReplica
from tests.healing.living import WAITS, stores
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only


def kept(rank: int, group: Any, port: int) -> list[int]:
    """Bytes that a rank of two keeps after each of four saves."""
    dist.destroy_process_group()
    os.environ.update(
        {
            STARTED: "1",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    replica = RunReplica(HealingConfig(1, **WAITS), device="cpu")
    replica.meet()
    sizes = []
    for step in range(4):
        gather(None)  # the collectives of a step
        replica.save(step, {"w": torch.full((64,), float(step))}, {"rank": rank})
        sizes.append(replica._copies.nbytes)
    assert replica.end()
    return sizes


def test_the_copies_of_two_states_are_kept_and_no_more():
    (store,) = stores(1)
    # Two portions of 32 numbers of 4 bytes: the rank's own and its neighbor's.
    for outcome in spawn_ranks(2, kept, store.port):
        assert outcome.result == [256, 512, 512, 512], outcome
