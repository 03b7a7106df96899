"""ZeroOptimizer as a torch Optimizer: groups, schedulers, closures, scaled losses; and what it
refuses, on every rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pyops.optim
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.hooks.reduced_gradient import ReducedGradient
from tests.grids import full
from tests.workers import spawn_ranks
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device


def _drive(rank: int, group: Any, stage: int) -> None:
    """Against the inner optimizer's class on one process' worth of gradients: the same program line
    by line."""
    size = dist.get_world_size(group)
    ours, theirs = Net(mixed=False), Net(mixed=False)
    zero = ZeroOptimizer(
        ours, torch.optim.AdamW, ZeroConfig(stage=stage), group=group, params=groups(ours), lr=1e-2
    )
    plain = torch.optim.AdamW(groups(theirs), lr=1e-2)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.02, 0.01], total_steps=9)
        for o in (zero, plain)
    ]
    assert [set(g) - {"params"} for g in zero.param_groups] == [
        set(g) - {"params"} for g in plain.param_groups
    ]
    for step in range(6):
        x, y = part(step, rank, size)
        if step == 3:  # by a closure

            def closure(x: Any = x, y: Any = y) -> Any:
                zero.zero_grad()
                loss = mean_loss(ours, x, y)
                loss.backward()
                return loss

            assert zero.step(closure).requires_grad
        else:
            mean_loss(ours, x, y).backward()
            assert all(
                isinstance(p.grad, ReducedGradient) for p in ours.parameters() if p.requires_grad
            )
            if step == 4:  # thrown away, and done again
                zero.zero_grad()
                mean_loss(ours, x, y).backward()
            zero.step()
        plain.zero_grad()
        for r in range(size):
            (mean_loss(theirs, *part(step, r, size)) / size).backward()
        plain.step()
        for schedule in schedules:
            schedule.step()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr() != [1e-2, 3e-3]
    with zero.whole_parameters():
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(
                p, q, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_drives_as_torch_optimizers_do(world, stage: int):
    world(2).run(_drive, stage)


def _scaled(rank: int, group: Any, stage: int, name: str) -> tuple[float, float]:
    """Scaled gradients give the norm and the step of unscaled ones; an inf on one rank skips the
    step on all."""
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    results = []
    for scale in (1.0, 1024.0):
        model = Net(mixed=False)
        zero = ZeroOptimizer(
            model, cls, ZeroConfig(stage=stage, max_grad_norm=0.2), group=group, lr=1e-2
        )
        zero.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        (mean_loss(model, *part(0, rank, dist.get_world_size(group))) * scale).backward()
        zero.step()
        assert zero.grad_norm is not None
        with zero.whole_parameters():
            results.append(
                (
                    float(zero.grad_norm),
                    {n: p.detach().clone() for n, p in model.named_parameters()},
                )
            )
        before = {n: p.clone() for n, p in results[-1][1].items()}
        x, y = part(1, rank, dist.get_world_size(group))
        (mean_loss(model, x, y) * (float("inf") if rank == 1 else 1.0)).backward()
        zero.step()
        with zero.whole_parameters():
            assert all(torch.equal(before[n], p) for n, p in model.named_parameters()), (
                "a skipped step changed something"
            )
        assert not any(p.grad is not None for p in model.parameters())
    (norm, plain), (scaled_norm, scaled) = results
    for n, p in plain.items():
        torch.testing.assert_close(scaled[n], p, rtol=1e-5, atol=1e-7)
    return norm, scaled_norm


@pytest.mark.parametrize("name", ["AdamW", full("torch.AdamW")])
def test_scaled_losses_and_overflow(world, name: str):
    model = Net(mixed=False)
    x, y = (torch.cat(pair) for pair in zip(part(0, 0, 2), part(0, 1, 2), strict=True))
    mean_loss(model, x, y).backward()
    expected = float(
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.2)
    )
    assert expected > 0.3, "nothing would be clipped"
    for stage in (0, 1, 2, 3):
        for norm, scaled in world(2).run(_scaled, stage, name):
            assert norm == pytest.approx(expected, rel=1e-5)
            assert scaled == pytest.approx(expected, rel=1e-5)


def _found_inf(rank: int, group: Any, stage: int) -> list[bool]:
    """Whether a step changed something: when rank 1 alone was told of an overflow, and when no rank
    was."""
    model, changed = Net(mixed=False), []
    zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=stage), group=group, lr=1e-2)
    for told in (float(rank == 1), 0.0):
        with zero.whole_parameters():
            before = [p.detach().clone() for p in model.parameters()]
        mean_loss(model, *part(0, rank, 2)).backward()
        zero.found_inf = torch.tensor([told])  # type: ignore[attr-defined]
        zero.step()
        with zero.whole_parameters():
            changed.append(
                not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            )
    return changed


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_that_one_rank_was_told_of_skips_the_step_on_all(world, stage: int):
    assert world(2).run(_found_inf, stage) == [[False, True]] * 2


def _refused(rank: int, group: Any, case: str) -> tuple[str, bool]:
    model = Net(mixed=False)
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    arguments: dict[str, Any] = {"stage": 2, "lr": 1e-3}
    cls: Any = AdamW
    other = rank == 1  # only one rank is wrong: every rank must hear of it
    if case == "stage":
        arguments["stage"] = 4
    elif case == "stages differ":
        arguments["stage"] = 1 if other else 2
    elif case == "lr differs":
        arguments["lr"] = 1e-2 if other else 1e-3
    elif case == "model differs":
        model = nn.Linear(3, 4 if other else 3)  # type: ignore[assignment]
        before = {}
    elif case == "class":
        cls = AdamW(model.parameters()) if other else AdamW
    elif case == "bucket":
        arguments["bucket_bytes"] = 0 if other else 1
    elif case == "norm":
        arguments["max_grad_norm"] = -1.0
    elif case == "strange parameter":
        arguments["params"] = [nn.Parameter(torch.zeros(3))] if other else None
    elif case == "twice":
        arguments["params"] = [model.first.weight, model.first.weight]
    elif case == "inner":
        arguments["betas"] = (0.9, 1.5)
    elif case == "unknown":
        arguments["momentun"] = 0.9
    elif case == "frozen":
        model.requires_grad_(False)
    elif case == "adafactor":
        cls = torch.optim.Adafactor
    elif case == "offloaded adafactor":
        cls, arguments["offload"] = pyops.optim.Adafactor, "cpu"
    elif case == "communicates":
        cls = __import__("pyops.onebit", fromlist=["OneBitLAMB"]).OneBitLAMB
    try:
        zero_optimizer(model, cls, group=group, **arguments)
    except (TypeError, ValueError) as error:
        same = all(
            p.data_ptr() == before[n][0] and torch.equal(p, before[n][1])
            for n, p in model.named_parameters()
            if before
        )
        hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
        return str(error), same and not hooks
    return "", False


REFUSED = {
    "stage": "stage is 4", "stages differ": "stage is 2 on rank 0, 1 on rank 1",
    "lr differs": "optimizer_arguments is", "model differs": "models differ",
    "class": "optimizer is AdamW", "bucket": "bucket_bytes is 0", "norm": "max_grad_norm is -1.0",
    "strange parameter": "no parameter of the model", "twice": "appears twice", "inner": "betas",
    "unknown": "momentun", "frozen": "no parameter requires a gradient",
    "adafactor": "optimizer is torch.optim.Adafactor", "offloaded adafactor": "Adafactor",
    "communicates": "communicates by itself",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_on_every_rank_before_anything_is_changed(world, case: str):
    for message, unchanged in world(2).run(_refused, case):
        assert REFUSED[case] in message
        assert unchanged


def _late_mistakes(rank: int, group: Any) -> list[str]:
    model = Net(mixed=False)
    zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=2), group=group, lr=1e-3)
    said = []
    for action in ("add group", "options differ"):
        try:
            if action == "add group":
                zero.add_param_group({"params": [model.frozen.weight]})
            else:
                mean_loss(model, *part(0, rank, 2)).backward()
                zero.param_groups[0]["lr"] = 1e-3 * (1 + rank)
                zero.step()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def test_later_mistakes(world):
    for group, options in world(2).run(_late_mistakes):
        assert "make a new one with all groups" in group
        assert "different options" in options


def _die(rank: int, group: Any, stage: int, when: str) -> str:
    model = Net(mixed=False)
    zero = ZeroOptimizer(
        model, AdamW, ZeroConfig(stage=stage, bucket_bytes=2000), group=group, lr=1e-3
    )

    def die(*_: Any) -> None:
        if rank == 1 and len(seen) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    seen: list[int] = []
    if when == "backward":
        model.blocks[1].inner.weight.register_post_accumulate_grad_hook(die)
    else:
        model.blocks[1].register_forward_pre_hook(die)
    try:
        for step in range(4):
            mean_loss(model, *part(step, rank, 2)).backward()
            zero.step()
            seen.append(step)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "when"), [(2, "backward"), (3, "forward")])
def test_a_rank_that_dies_is_named(stage: int, when: str):
    outcomes = spawn_ranks(2, _die, stage, when, group_timeout=5.0, timeout=60.0)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "rank 1" in outcomes[0].result
    assert "died" in outcomes[0].result
