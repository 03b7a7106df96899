"""The loss scale goes the way that the script says, and a step that one rank can't take changes
nothing on any."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pyops.optim
from pyops.precision import PRECISIONS, LossScale, LossScaler, overflowed


def trajectory(script: str, **options: Any) -> list[float]:
    """The scale before each step; "x" is an overflow."""
    scale = LossScale(**options)
    found = []
    for step in script:
        found.append(scale.scale)
        scale.update(step == "x")
    return [*found, scale.scale]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        # grows after every window of good steps in a row
        ("......", {"window": 2, "initial": 4}, [4, 4, 8, 8, 16, 16, 32]),
        (".x...", {"window": 2, "initial": 4, "hysteresis": 1}, [4, 4, 2, 2, 4, 4]),
        # the first overflow is forgiven, those after it not, until it has grown
        (
            "xxx..x.xx",
            {"window": 2, "initial": 64, "hysteresis": 2},
            [64, 64, 32, 16, 16, 32, 32, 32, 16, 8],
        ),
        # without growth in between, good steps don't fill the hysteresis up again
        ("x.x.x", {"window": 9, "initial": 64, "hysteresis": 2}, [64, 64, 64, 32, 32, 16]),
        # unless only overflows in a row count
        (
            "x.x.x",
            {"window": 9, "initial": 64, "hysteresis": 2, "consecutive_hysteresis": True},
            [64] * 6,
        ),
        (
            "xx.xx",
            {"window": 9, "initial": 64, "hysteresis": 2, "consecutive_hysteresis": True},
            [64, 64, 32, 32, 32, 16],
        ),
        ("xxxx", {"initial": 64, "hysteresis": 3}, [64, 64, 64, 32, 16]),
        # the window begins anew with an overflow, also with one that is forgiven
        ("..x...", {"window": 3, "initial": 4, "hysteresis": 2}, [4, 4, 4, 4, 4, 4, 8]),
        ("xx.", {"initial": 81, "factor": 3, "window": 1, "hysteresis": 1}, [81, 27, 9, 27]),
    ],
)
def test_trajectories(script, options, expected):
    assert trajectory(script, **options) == expected


@pytest.mark.cpu_only
def test_at_the_minimum_it_warns_and_goes_on():
    scale = LossScale(initial=2, minimum=1.5, hysteresis=1, window=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale.update(True)
    assert scale.scale == 1.5
    with pytest.warns(
        RuntimeWarning, match=r"overflow at the smallest loss scale, 1.5: the step is skipped"
    ):
        scale.update(True)
    assert (scale.scale, scale.skipped) == (1.5, 2)
    scale.update(False)
    assert scale.scale == 3


@pytest.mark.cpu_only
def test_it_does_not_grow_beyond_fp32():
    assert trajectory("...", initial=2.0**126, window=1) == [2.0**126, 2.0**127, 2.0**127, 2.0**127]


@pytest.mark.cpu_only
@pytest.mark.parametrize("script", ["..x...xx..x..", "xxxx....x"])
def test_a_saved_one_continues(script):
    options: dict[str, Any] = {"initial": 64, "window": 3, "hysteresis": 2}
    straight = trajectory(script, **options)
    for cut in range(len(script)):
        first = LossScale(**options)
        for step in script[:cut]:
            first.update(step == "x")
        second = LossScale(**options)
        second.load_state_dict(first.state_dict())
        assert second.skipped == first.skipped
        for at, step in enumerate(script[cut:], cut):
            assert second.scale == straight[at]
            second.update(step == "x")
        assert second.scale == straight[-1]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, "factor of the loss scale is 1.0"),
        ({"window": 0}, "window of the loss scale is 0"),
        ({"hysteresis": 0}, "hysteresis of the loss scale is 0"),
        ({"minimum": 0.0}, "minimum of the loss scale is 0.0"),
        (
            {"initial": 0.5},
            "initial of the loss scale is 0.5; it must be at least the minimum, 1.0",
        ),
        ({"initial": float("inf")}, "initial of the loss scale is inf"),
    ],
)
def test_what_makes_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        LossScale(**options)
    with pytest.raises(ValueError, match=message):
        LossScaler(**options)


@pytest.mark.cpu_only
def test_a_state_that_is_none():
    scale = LossScale()
    for state, message in [
        ({}, "lacks"),
        ({**scale.state_dict(), "scale": float("nan")}, "loss scale is nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            scale.load_state_dict(state)
    assert scale.scale == 2.0**16


OPTIMIZERS = {
    "pyops AdamW": lambda p: pyops.optim.AdamW(p, lr=0.1, max_grad_norm=1.0),
    "pyops SGD": lambda p: pyops.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def model_of(device: torch.device | str) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3).to(device)


def loss_of(model: nn.Module, step: int, *, bad: bool = False) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4, device=next(model.parameters()).device) + step
    return model(x).square().sum() * (float("inf") if bad else 1.0)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_without_scaling_and_skipped_ones_change_nothing(device, name, unscale):
    plain, scaled = model_of(device), model_of(device)
    a, b = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](scaled.parameters())
    scaler = LossScaler(initial=1024.0, hysteresis=1, window=100)
    for step in range(6):
        bad = step in (2, 4)
        before = everything(scaled, b)
        b.zero_grad()
        scaler.scale(loss_of(scaled, step, bad=bad)).backward()
        if unscale:
            scaler.unscale_(b)
        scaler.step(b)
        assert scaler.update() is not bad
        if bad:
            assert same(everything(scaled, b), before)
            continue
        assert not same(everything(scaled, b), before), (
            "a step that does nothing would pass this test"
        )
        a.zero_grad()
        loss_of(plain, step).backward()
        a.step()
        for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
            assert torch.equal(p, q), "powers of two: scaling changes no bit"
    assert scaler.get_scale() == 256.0
    assert scaler.loss_scale.skipped == 2
    assert not hasattr(b, "found_inf")


def test_disabled_passes_everything_through(device):
    model = model_of(device)
    optimizer, scaler, loss = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        LossScaler(enabled=False),
        loss_of(model, 0),
    )
    before = copy.deepcopy(model.state_dict())
    assert scaler.scale(loss) is loss
    scaler.scale([loss])[0].backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.update()
    assert not same(before, model.state_dict())
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})


def test_calls_in_a_wrong_order(device):
    model = model_of(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler()
    with pytest.raises(RuntimeError, match="no step to judge"):
        scaler.update()
    first, second = scaler.scale((loss_of(model, 0), loss_of(model, 1)))
    (first + second).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="called twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="called twice"):
        scaler.step(optimizer)


@pytest.mark.real_device
def test_overflow_is_found_in_any_gradient(device):
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    fine = [torch.ones(5, device=device, dtype=d) for d in dtypes] + [
        torch.ones(4, 6, device=device)[:, ::2]
    ]
    fine.append(torch.sparse_coo_tensor([[1]], [2.0], (5,), device=device, check_invariants=True))
    assert overflowed(fine).item() == 0
    assert overflowed([]).item() == 0
    for i, tensor in enumerate(fine):
        for value in float("inf"), float("-inf"), float("nan"):
            bad = tensor.clone()
            values = bad._values() if bad.is_sparse else bad
            values[(-1,) * values.dim()] = value
            assert overflowed([*fine[:i], bad, *fine[i + 1 :]]).item() == 1, (tensor.dtype, value)
    assert overflowed([torch.full((3,), 3e38, device=device)]).item() == 0, "large is not overflow"


def on_ranks(rank: int, group: Any, name: str) -> list[Any]:
    """Each rank steps its own part, as with states over ranks; in steps 1 and 2 one rank alone has
    an inf."""
    model = model_of("cpu")
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = LossScaler(group=group, initial=8.0, hysteresis=1)
    told: list[Any] = []
    for step in range(4):
        before = everything(model, optimizer)
        optimizer.zero_grad()
        scaler.scale(
            loss_of(model, step + rank, bad=step in (1, 2) and rank == step % 2)
        ).backward()
        if step == 3 and rank == 1:
            optimizer.zero_grad(
                set_to_none=True
            )  # a rank without gradients takes part all the same
        scaler.step(optimizer)
        stepped = scaler.update()
        told.append((stepped, scaler.get_scale()))
        assert stepped or same(before, everything(model, optimizer))
    return told


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_ranks_overflow_skips_the_step_on_all(world, name):
    first, second = world(2).run(on_ranks, name)
    assert first == second == [(True, 8.0), (False, 4.0), (False, 2.0), (True, 2.0)]


def test_fp16_with_masters_trains(device):
    """Gradients of 1e-8 vanish in fp16, unless they are scaled."""
    torch.manual_seed(0)
    wanted = torch.randn(16, device=device)
    moved = []
    for enabled in False, True:
        p = nn.Parameter(torch.zeros(16, device=device, dtype=PRECISIONS["fp16"].dtype))
        optimizer = pyops.optim.SGD([p], lr=1e7, master_weights=PRECISIONS["fp16"].master_weights)
        scaler = LossScaler(enabled=enabled)
        for _ in range(20):
            optimizer.zero_grad()
            # The factor of 1e-8 meets the gradient in fp32 when it is scaled there, in fp16 when it
            # is not.
            loss = ((p.float() - wanted).square().sum()) * 1e-8
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        moved.append((p.float() - wanted).abs().max().item())
    assert moved[0] > 0.5
    assert moved[1] < 0.5 * moved[0]


@pytest.mark.cpu_only
def test_what_precisions_mean():
    assert {n: (p.dtype, p.master_weights, p.scaled) for n, p in PRECISIONS.items()} == {
        "fp32": (torch.float32, False, False),
        "bf16": (torch.bfloat16, True, False),
        "fp16": (torch.float16, True, True),
    }


def test_a_loss_without_memory_is_refused():
    loss = torch.ones(())
    loss.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="the loss has elements but no memory"):
        LossScaler().scale([torch.ones(()), loss])
