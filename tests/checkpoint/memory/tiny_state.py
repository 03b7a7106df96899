"""A state so small that ranks can save it many times, and what they take of it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pyops.checkpoint import MemoryCheckpoints, load
from pyops.checkpoint.memory.snapshot import snapshot_name
from pyops.flat import Shard

RUN = "a1b2"
NUMEL = 6  # of the sharded tensor, over all ranks
STEPS = (10, 20, 30)  # the first is gone after the last


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    numel = NUMEL // size
    part = torch.arange(rank * numel, (rank + 1) * numel) + float(step)
    shard = Shard((NUMEL,), (rank * numel,), part)
    return {"whole": torch.full((3,), float(step)), "step": step, "moments": {"w": shard}}


def memory_of(
    rank: int, folder: Path, hosts: str = "", *, by_messages: bool = False
) -> MemoryCheckpoints:
    """Of a rank that runs on the host of this letter, all on one by default; or of ranks with one
    folder that take one another for ranks of other hosts."""
    if not hosts and not by_messages:
        return MemoryCheckpoints(folder / "memory", run=RUN)
    host = hosts[rank] if hosts else f"host of rank {rank}"
    with mock.patch("pyops.checkpoint.memory.checkpoints.machine", return_value=host):
        return MemoryCheckpoints(folder / (f"host-{host}" if hosts else "memory"), run=RUN)


def save_step(memory: MemoryCheckpoints, step: int, rank: int) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    memory.save(step, state_of(step, rank, size), own={"seed": torch.tensor([step, rank])})


def save(
    rank: int, group: object, folder: Path, steps: tuple[int, ...] = STEPS, hosts: str = ""
) -> None:
    memory = memory_of(rank, folder, hosts)
    for step in steps:
        save_step(memory, step, rank)


def recover(rank: int, group: object, folder: Path, newer_than: int = -1, hosts: str = "") -> Any:
    """(name of the checkpoint, state, own, what was said)."""
    found, said = memory_of(rank, folder, hosts).recover(folder / "disk", newer_than=newer_than)
    if found is None:
        return None, None, None, said
    state, own = load(found, compare=True)
    return found.name, state, own, said


def snapshot(run: Path, keeper: int, step: int, source: int) -> Path:
    return run / "memory" / f"pyops-{RUN}" / f"rank-{keeper:05}" / snapshot_name(step, source)


def check(told: list[Any], step: int | None, *said: str, saved_by: int | None = None) -> None:
    """All ranks have this step whole, and were told the same; of more ranks than saved it, the last
    have nothing of their own."""
    for rank, (name, state, own, notes) in enumerate(told):
        assert all(any(part in note for note in notes) for part in said), notes
        assert said or not notes, notes
        assert notes == told[0][3]
        if step is None:
            assert name is None
            continue
        assert name == f"step-{step:08}"
        assert state["step"] == step
        assert torch.equal(state["whole"], torch.full((3,), float(step)))
        assert torch.equal(state["moments"]["w"], torch.arange(NUMEL) + float(step))
        if rank >= (len(told) if saved_by is None else saved_by):
            assert own is None
        else:
            assert torch.equal(own["seed"], torch.tensor([step, rank]))
