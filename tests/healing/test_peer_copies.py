"""Copies of a state whose making a lost rank has broken off, and what is recovered afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.comm import CommunicationError
from pyops.healing.peer_copies import PeerCopies

pytestmark = pytest.mark.cpu_only


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(6.0) + step, "step": step}


def broken_off(rank: int, group: object) -> list[int]:
    """The steps that are recovered where rank 1 is lost while it copies, and again later."""

    def lost(mine: Any) -> Any:
        raise CommunicationError("rank 1 died")

    assert dist.group.WORLD is not None
    copies = PeerCopies()
    copies.join(dist.group.WORLD)
    copies.save(1, state(1))
    dist.barrier()
    copies.settle()
    if rank == 0:
        copies._swapped = lost  # type: ignore[method-assign]
        with pytest.raises(CommunicationError):
            copies.save(2, state(2))
        del copies._swapped
    found = []
    for _ in range(2):
        if rank:
            copies = PeerCopies()  # of a replacement
        copies.join(dist.group.WORLD)
        recovered = copies.recover(lambda path, shape: None)
        assert recovered is not None
        step, values = recovered
        assert torch.equal(values["w"], state(step)["w"])
        found.append(step)
        copies.save(step, state(step))
        dist.barrier()
        copies.settle()
    return found


def test_portions_of_a_step_that_was_not_copied_whole_are_let_go(world: Any) -> None:
    assert world(2).run(broken_off) == [[1, 1], [1, 1]]
