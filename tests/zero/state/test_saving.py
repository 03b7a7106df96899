"""A run that is saved and taken up again goes on as if nothing had happened, on any stage and
number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops import checkpoint
from pyops.flat import Shard
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import cut
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device

Trace = tuple[list[float], dict[str, Tensor]]  # losses, and parameters after the last step


def _make(model: Net, group: Any, stage: int, name: str, bucket_bytes: int) -> ZeroOptimizer:
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    return ZeroOptimizer(
        model,
        cls,
        ZeroConfig(stage=stage, bucket_bytes=bucket_bytes, max_grad_norm=1.0),
        group=group,
        params=groups(model),
        lr=1e-2,
    )


def _steps(model: Net, optimizer: ZeroOptimizer, group: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = part(step, dist.get_rank(group), dist.get_world_size(group))
        dtype = next(model.parameters()).dtype
        loss = mean_loss(model, x.to(dtype), y.to(dtype), sometimes=step % 2 == 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _net(dtype: torch.dtype, seed: int = 0) -> Net:
    return Net(seed=seed, mixed=False).to(dtype)


def _save(rank: int, group: Any, folder: str, stage: int, name: str, dtype: torch.dtype) -> Trace:
    model = _net(dtype)
    optimizer = _make(model, group, stage, name, 1500)
    _steps(model, optimizer, group, range(4))
    checkpoint.save(
        folder,
        {"model": optimizer.model_state_dict(), "optimizer": optimizer.state_dict()},
        group=group,
    )
    losses = _steps(model, optimizer, group, range(4, 8))
    with optimizer.whole_parameters():
        return losses, {k: v.clone() for k, v in model.state_dict().items()}


def _resume(rank: int, group: Any, folder: str, stage: int, name: str, dtype: torch.dtype) -> Trace:
    model = _net(dtype, seed=5)
    optimizer = _make(model, group, stage, name, 700)
    state, _ = checkpoint.load(folder, lazy=stage == 3)
    optimizer.load_model_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = _steps(model, optimizer, group, range(4, 8))
    with optimizer.whole_parameters():
        return losses, {k: v.clone() for k, v in model.state_dict().items()}


# AdamW of float32 goes on in test_another_number_of_ranks_goes_on. Every stage is saved at or gone
# on at, and stage 3 both.
KEPT = [
    ("AdamW", torch.bfloat16, (1,)),
    ("LAMB", torch.float32, (3,)),
    ("Adafactor", torch.bfloat16, (1, 2)),
]
REST = [
    ("AdamW", torch.bfloat16, (2, 3)),
    ("LAMB", torch.float32, (1, 2)),
    ("Adafactor", torch.bfloat16, (3,)),
    ("AdamW", torch.float32, (1, 2, 3)),
    ("LAMB", torch.bfloat16, (1, 2, 3)),
    ("Adafactor", torch.float32, (1, 2, 3)),
    *(("torch.AdamW", dtype, (1, 2, 3)) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize(
    ("name", "dtype", "stages"),
    cut([*KEPT, *REST], keep=KEPT),
)
def test_resumes_bit_for_bit_at_another_stage_and_bucket_size(
    world, tmp_path: Path, name: str, dtype: torch.dtype, stages: tuple[int, ...]
):
    saved_at = 3 if name == "AdamW" else 2
    losses, parameters = world(3).run(_save, str(tmp_path / "a"), saved_at, name, dtype)[0]
    start = _net(dtype).state_dict()
    assert sum(not torch.equal(start[key], value) for key, value in parameters.items()) > 10, (
        "nothing was trained"
    )
    for stage in stages:
        again, resumed = world(3).run(_resume, str(tmp_path / "a"), stage, name, dtype)[0]
        assert again == losses
        for key, value in parameters.items():
            assert torch.equal(resumed[key], value), (stage, key)


def test_another_number_of_ranks_goes_on(world, tmp_path: Path):
    _, parameters = world(3).run(_save, str(tmp_path / "a"), 1, "AdamW", torch.float32)[0]
    start = _net(torch.float32).state_dict()
    for size, stage in ((1, 2), (2, 3)):
        _, resumed = world(size).run(_resume, str(tmp_path / "a"), stage, "AdamW", torch.float32)[0]
        for key, value in parameters.items():
            torch.testing.assert_close(resumed[key], value, rtol=1e-4, atol=1e-5)
    assert sum(not torch.equal(start[key], value) for key, value in parameters.items()) > 10


def _state(rank: int, group: Any, stage: int) -> dict[str, Any]:
    model = _net(torch.float32)
    optimizer = _make(model, group, stage, "AdamW", 1500)
    _steps(model, optimizer, group, range(2))
    return optimizer.state_dict()


def test_ranges_of_all_ranks_cover_every_state_once(world):
    states = world(3).run(_state, 2)
    names = {name for state in states for name in state["state"]}
    assert "blocks.0.inner.weight" in names
    assert "never.weight" not in names, "it has never been stepped"
    for name in names:
        shards = [state["state"][name]["exp_avg"] for state in states if name in state["state"]]
        assert all(isinstance(shard, Shard) for shard in shards)
        ranges = sorted((s.offset[0], s.offset[0] + s.tensor.numel()) for s in shards)
        assert ranges[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert ranges[-1][1] == torch.Size(shards[0].global_shape).numel()
        steps = [state["state"][name]["step"] for state in states if name in state["state"]]
        assert len(steps) == len(shards), "a rank that takes its own part back needs it"
        assert sum(not step.copy for step in steps) == 1


def _refuse(rank: int, group: Any, change: str) -> tuple[str, bool]:
    model = _net(torch.float32)
    optimizer = _make(model, group, 2, "AdamW", 1500)
    _steps(model, optimizer, group, range(2))
    before = {
        key: value.clone()
        for key, value in optimizer.owned.optimizer.state_dict()["state"].get(0, {}).items()
    }
    state = {
        "state": {name: dict(entries) for name, entries in optimizer.state_dict()["state"].items()},
        "param_groups": [dict(g) for g in optimizer.state_dict()["param_groups"]],
    }
    if change == "names":
        state["param_groups"][0]["params"] = [*state["param_groups"][0]["params"][1:], "strange"]
    elif change == "groups":
        state["param_groups"].pop()
    elif change == "shape" and rank == 1:  # on one rank only: all must refuse
        name = next(iter(state["state"]))
        state["state"][name]["exp_avg"] = torch.zeros(3)
    elif change == "part" and rank == 0:
        name = next(n for n, e in state["state"].items() if e["exp_avg"].tensor.numel() > 5)
        shard = state["state"][name]["exp_avg"]
        state["state"][name]["exp_avg"] = Shard(shard.global_shape, shard.offset, shard.tensor[:-2])
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        after = optimizer.owned.optimizer.state_dict()["state"].get(0, {})
        return str(error), all(torch.equal(before[key], after[key]) for key in before)
    return "", False


@pytest.mark.parametrize(
    ("change", "words"),
    [("names", "strange"), ("groups", "param groups"), ("shape", "shape"), ("part", "only a part")],
)
def test_a_foreign_state_is_refused_on_every_rank(world, change: str, words: str):
    for message, unchanged in world(2).run(_refuse, change):
        assert words in message
        assert unchanged
