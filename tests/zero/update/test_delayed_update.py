"""Updates one step late: the bits of a simulation, saved in the middle, at every stage, and a model
that still learns."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops import checkpoint
from pyops.zero import ZeroOptimizer
from pyops.zero.update.delayed_update import DelayedUpdate
from tests.grids import full
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device

STEPS = 7


def _gradients(
    rank: int, size: int, step: int, model: Net, dtype: torch.dtype, *, broken: bool
) -> None:
    x, y = part(step, rank, size)
    loss = mean_loss(model, x.to(dtype), y.to(dtype), sometimes=step % 2 == 1)
    (loss * float("inf") if broken and step == 4 else loss).backward()


def _simulate(
    rank: int, group: Any, name: str, dtype: torch.dtype, after: int, broken: bool
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The model before each step, and what the last update makes of it: an ordinary ZeroOptimizer
    beside a stale model."""
    stale, ahead = Net(mixed=False).to(dtype), Net(mixed=False).to(dtype)
    zero = _optimizer(ahead, name, group, stage=1)
    seen, waiting = [], [p.detach().clone() for p in ahead.parameters()]
    for step in range(STEPS):
        seen.append({n: p.detach().clone() for n, p in stale.named_parameters()})
        latest = [p.detach().clone() for p in ahead.parameters()]
        with torch.no_grad():  # gradients are those of the stale model
            for p, old in zip(ahead.parameters(), stale.parameters(), strict=True):
                p.copy_(old)
        _gradients(rank, dist.get_world_size(group), step, ahead, dtype, broken=broken)
        with torch.no_grad():
            for p, new in zip(ahead.parameters(), latest, strict=True):
                p.copy_(new)
        zero.step()
        waiting = latest if step >= after else [p.detach().clone() for p in ahead.parameters()]
        with torch.no_grad():
            for p, new in zip(stale.parameters(), waiting, strict=True):
                p.copy_(new)
    return seen, {n: p.detach().clone() for n, p in ahead.named_parameters()}


def _optimizer(model: Net, name: str, group: Any, **options: Any) -> ZeroOptimizer:
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    return zero_optimizer(
        model,
        cls,
        bucket_bytes=2000,
        max_grad_norm=0.2,
        group=group,
        params=groups(model),
        lr=1e-2,
        **options,
    )


def _run(
    rank: int,
    group: Any,
    stage: int,
    name: str,
    dtype: torch.dtype,
    after: int,
    offload: str,
    folder: str | None,
    broken: bool,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], set[str]]:
    """The same with delayed updates; with a folder, another optimizer goes on from a checkpoint in
    the middle."""

    def make() -> tuple[Net, ZeroOptimizer]:
        model = Net(mixed=False).to(dtype)
        return model, _optimizer(
            model, name, group, stage=stage, offload=offload, delayed_update=after or True
        )

    model, zero = make()
    seen, threads = [], set()
    zero.owned.optimizer.register_step_pre_hook(
        lambda *_: threads.add(threading.current_thread().name)
    )
    for step in range(STEPS):
        with zero.whole_parameters():
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        _gradients(rank, dist.get_world_size(group), step, model, dtype, broken=broken)
        zero.step()
        if step == 3 and folder is not None:
            checkpoint.save(
                folder,
                {"model": zero.model_state_dict(), "optimizer": zero.state_dict()},
                group=group,
            )
            model, zero = make()
            state, _ = checkpoint.load(folder, lazy=True)
            zero.load_model_state_dict(state["model"])
            zero.load_state_dict(state["optimizer"])
    zero.finish_update()
    with zero.whole_parameters():
        return seen, {n: p.detach().clone() for n, p in model.named_parameters()}, threads


@pytest.mark.parametrize(
    ("stage", "name", "dtype", "after", "place", "broken", "saved"),
    [  # saved: what of both, a run and one that goes on from a checkpoint
        full(1, "AdamW", torch.float32, 2, "cpu", True, (False, True)),
        full(2, "AdamW", torch.bfloat16, 2, "cpu", False, (False, True)),
        (2, "torch.AdamW", torch.bfloat16, 3, "cpu", True, (True,)),
        full(2, "torch.AdamW", torch.bfloat16, 3, "cpu", True, (False,)),
        (3, "AdamW", torch.float32, 0, "cpu", False, (False, True)),
        full(2, "torch.AdamW", torch.bfloat16, 0, "disk", True, (False,)),
        full(2, "torch.AdamW", torch.bfloat16, 0, "disk", True, (True,)),
        full(2, "AdamW", torch.float32, 2, "disk", False, (False, True)),
    ],
)
def test_delayed_updates_have_the_bits_of_a_simulation(
    world, tmp_path: Path, stage, name, dtype, after, place, broken, saved: tuple[bool, ...]
):
    offload = "cpu" if place == "cpu" else str(tmp_path)
    want, last = world(2).run(_simulate, name, dtype, after, broken)[0]
    assert not all(torch.equal(want[after + 1][n], p) for n, p in want[STEPS - 1].items()), (
        "the simulation moves"
    )
    if after:
        assert not all(torch.equal(want[after - 1][n], p) for n, p in want[after].items())
    assert all(torch.equal(want[after][n], p) for n, p in want[after + 1].items()), (
        "the first delayed step changes nothing"
    )
    for folder in (str(tmp_path / "checkpoint") if each else None for each in saved):
        for seen, ended, threads in world(2).run(
            _run, stage, name, dtype, after, offload, folder, broken
        ):
            for step, (found, expected) in enumerate(zip(seen, want, strict=True)):
                for n, p in expected.items():
                    assert torch.equal(found[n], p), (step, n, folder)
            for n, p in last.items():
                assert torch.equal(ended[n], p), (n, folder)
            assert any("delayed update" in thread for thread in threads)


def _taken_up(rank: int, group: Any, folder: str) -> bool:
    """Whether a state that is ahead of its model is taken up without delays: by every rank's whole
    model."""
    model = Net(mixed=False)
    zero = _optimizer(model, "AdamW", group, stage=2, offload="cpu", delayed_update=True)
    for step in range(3):
        _gradients(rank, dist.get_world_size(group), step, model, torch.float32, broken=False)
        zero.step()
    checkpoint.save(
        folder, {"model": zero.model_state_dict(), "optimizer": zero.state_dict()}, group=group
    )
    stale = {n: p.detach().clone() for n, p in model.named_parameters()}
    zero.finish_update()
    other = Net(seed=5, mixed=False)
    plain = _optimizer(other, "AdamW", group, stage=1)
    state, _ = checkpoint.load(folder)
    plain.load_model_state_dict(state["model"])
    plain.load_state_dict(state["optimizer"])
    same = all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    return same and not all(torch.equal(stale[n], p) for n, p in model.named_parameters())


def test_a_state_that_is_ahead_is_taken_up_without_delays(world, tmp_path: Path):
    assert all(world(2).run(_taken_up, str(tmp_path / "checkpoint")))


def _loss(rank: int, group: Any, delayed: bool | int) -> tuple[float, float]:
    """Before and after 80 steps on one batch."""
    model = Net(mixed=False)
    options: dict[str, Any] = {"offload": "cpu", "delayed_update": delayed} if delayed else {}
    zero = zero_optimizer(
        model, pyops.optim.AdamW, stage=1, params=groups(model), lr=1e-2, **options
    )
    x, y = part(0, 0, 1)
    losses = []
    for _ in range(80):
        loss = mean_loss(model, x, y)
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_it_learns_about_as_well(world):
    ((first, plain),), ((same, late),) = (world(1).run(_loss, delayed) for delayed in (False, 10))
    assert first == same
    assert plain < 0.55 * first
    assert late < 0.55 * first
    assert plain != late


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"delayed_update": True}, ValueError, "offload is .none."),
        ({"delayed_update": True, "stage": 3, "offload": "."}, ValueError, "stage 2"),
        ({"delayed_update": -1, "offload": "cpu"}, ValueError, "0 or more"),
        ({"delayed_update": "yes", "offload": "cpu"}, TypeError, "number of steps"),
    ],
)
def test_refuses(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        zero_optimizer(Net(mixed=False), pyops.optim.AdamW, **{"stage": 1, "lr": 1e-3, **options})


def test_the_factor_is_kept_for_the_stream_of_the_update(monkeypatch: pytest.MonkeyPatch):
    """It is memory of the caller's stream, and the thread lets go of it while the other stream may
    still read it. Stand-ins for CUDA."""
    told: list[Any] = []
    factor: Any = SimpleNamespace(is_cuda=True, record_stream=told.append)
    stream = SimpleNamespace(device="cuda:0", wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    owned: Any = SimpleNamespace(flats=[], all_pieces=list, step=lambda factor: None)
    update = DelayedUpdate(owned, after=0)
    update._stream = stream
    update.start(factor, reused=[])
    update.wait()
    assert told == [stream]
