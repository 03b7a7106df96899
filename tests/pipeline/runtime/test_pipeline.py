"""Pipeline.step: losses and gradients, in one process and over ranks, against the same
micro-batches one after the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, Schedule, custom, schedule
from pyops.pipeline.transport import links, mailboxes
from tests.grids import cut, full
from tests.pipeline.reference import batch, mlp, sequential_step

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb", "zbv")
RECOMPUTE = ("never", "always", "except_last")


def made(name: str, k: int, m: int, recompute: str = "never", **options: Any) -> Schedule:
    return schedule(name, num_stages=k, num_microbatches=m, **options).with_recompute(recompute)


def gradients(layers: list[nn.Module]) -> list[torch.Tensor]:
    found = [p.grad for layer in layers for p in layer.parameters()]
    assert all(g is not None and bool((g != 0).any()) for g in found)
    return found


# Every schedule, and each way to recompute where backward is one action and where it is two.
GRID = [(name, recompute) for name in SYNCHRONOUS for recompute in RECOMPUTE]
IN_SUITE = [case for case in GRID if case[1] == "never" or case[0] in ("1f1b", "zbv")]


# (stages, micro-batches) of 10 rows, of which 3, 4 and 7 are uneven.
SIZES = set(itertools.product((1, 2, 4), (1, 3, 4, 7)))
FEW = {(1, 3), (2, 1), (2, 4), (4, 3), (4, 7)}


@pytest.mark.parametrize("sizes", [pytest.param(FEW, id="few"), full(SIZES - FEW, id="others")])
@pytest.mark.parametrize(("name", "recompute"), cut(GRID, keep=IN_SUITE))
def test_gradients_have_the_bits_of_a_sequential_run(
    name: str, recompute: str, sizes: set[tuple[int, int]]
):
    x, target = batch(10)
    whole = mlp()
    mse(nn.Sequential(*whole)(x), target).backward()
    for k, m in sorted(sizes):
        plan = made(name, k, m, recompute)
        ours, theirs = mlp(), mlp()
        pipeline = Pipeline(ours, schedule=plan, group=ALONE, loss=mse)
        loss = pipeline.step(x, target)
        expected = sequential_step(theirs, plan, pipeline.boundaries, x, target, mse)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for a, b, c in zip(gradients(ours), gradients(theirs), gradients(whole), strict=True):
            assert torch.equal(a, b), (k, m)
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)
        assert all(stage.num_in_flight == 0 for stage in pipeline.stages.values())


def over_ranks(rank: int, group: Any, name: str, k: int, m: int, recompute: str) -> None:
    x, target = batch(10)
    plan = made(name, k, m, recompute)
    ours, theirs = mlp(), mlp()
    pipeline = Pipeline(ours, schedule=plan, group=group, loss=mse)
    for _ in range(3):  # the first step learns the sizes of the messages
        pipeline.zero_grad()
        loss = pipeline.step(
            x if pipeline.has_first else None, target if pipeline.has_last else None
        )
    expected = sequential_step(theirs, plan, pipeline.boundaries, x, target, mse)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    named = dict(nn.Sequential(*theirs).named_parameters())
    own = dict(pipeline.named_parameters())
    assert own
    assert all(
        p.grad is not None and torch.equal(p.grad, named[n].grad) and bool((p.grad != 0).any())
        for n, p in own.items()
    )
    y = pipeline(x if pipeline.has_first else None)
    if pipeline.has_last:
        torch.testing.assert_close(y, nn.Sequential(*theirs)(x))
    else:
        assert y is None
    pipeline.close()


OF_RANKS = [(2, 1, "never"), (2, 5, "except_last"), (3, 4, "always"), (4, 6, "never")]
# Every schedule with recomputation and without, and every number of ranks with half of them.
HALVES = [
    (name, case) for number, name in enumerate(SYNCHRONOUS) for case in OF_RANKS[number % 2 :: 2]
]


@pytest.mark.parametrize(
    ("name", "case"), cut(itertools.product(SYNCHRONOUS, OF_RANKS), keep=HALVES)
)
def test_over_ranks_as_in_one_process(world, name: str, case: tuple[int, int, str]):
    k, m, recompute = case
    world(k).run(over_ranks, name, k, m, recompute)


def sizes_change(rank: int, group: Any) -> None:
    for plan in (made("1f1b", 2, 4), made("zbv", 2, 4)):
        pipeline = Pipeline(mlp(), schedule=plan, group=group, loss=mse)
        for rows in (4, 40, 5, 400, 400, 8):
            x, target = batch(rows)
            pipeline.zero_grad()
            loss = pipeline.step(x, target)
            theirs = mlp()
            expected = sequential_step(theirs, plan, pipeline.boundaries, x, target, mse)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            named = dict(nn.Sequential(*theirs).named_parameters())
            assert all(torch.equal(p.grad, named[n].grad) for n, p in pipeline.named_parameters())


def test_micro_batches_of_changing_sizes_travel(world):
    world(2).run(sizes_change)


class Several(nn.Module):
    """Takes and gives several values, some of which are no tensors."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), last

    def forward(self, x: Any, note: dict[str, Any] | None = None, *, shift: Any = 0.0) -> Any:
        note = note or {
            "count": 0,
            "name": "x",
            "mask": None,
            "ids": torch.arange(len(x)),
            "none": torch.empty(0, 3),
        }
        assert note["name"] == "x"
        assert note["none"].shape == (0, 3)
        assert torch.equal(note["ids"], torch.arange(len(x)))
        y = torch.tanh(self.linear(x)) + shift
        return y if self.last else (y, note | {"count": note["count"] + 1, "mask": y > 0})


def several(rank: int, group: Any) -> None:
    x, target = batch(10)
    shift = torch.linspace(-1, 1, 10)[:, None]
    torch.manual_seed(0)
    layers = [Several(last=i == 3) for i in range(4)]
    value: Any = x
    for layer in layers:
        value = (
            layer(*value, shift=shift) if isinstance(value, tuple) else layer(value, shift=shift)
        )
    mse(value, target).backward()
    expected = {n: p.grad for n, p in nn.Sequential(*layers).named_parameters()}
    for layer in layers:
        layer.zero_grad()
    pipeline = Pipeline(layers, schedule=made("1f1b", 2, 3), group=group, loss=mse)
    pipeline.step(x, target, shift=shift)
    for name, p in pipeline.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-7)


def test_several_arguments_and_what_is_no_tensor(world):
    world(2).run(several)
    several(0, None)


def test_the_users_own_orders_run():
    plan = custom(["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"])
    x, target = batch(6)
    ours, theirs = mlp(), mlp()
    pipeline = Pipeline(ours, schedule=plan, group=ALONE, loss=mse)
    pipeline.step(x, target)
    sequential_step(theirs, plan, pipeline.boundaries, x, target, mse)
    assert all(torch.equal(a, b) for a, b in zip(gradients(ours), gradients(theirs), strict=True))


def test_losses_count_by_rows_by_tokens_or_as_sums():
    x, target = (each.double() for each in batch(10))
    kept = torch.zeros(10, 8, dtype=torch.float64)
    kept[:7] = 1.0
    masked = {"y": target, "kept": kept}

    def mean_over_kept(y: Any, wanted: Any) -> Any:
        return ((y - wanted["y"]).square() * wanted["kept"]).sum() / wanted["kept"].sum().clamp(
            min=1
        )

    for loss, wanted, options in (
        (mse, target, {}),
        (mean_over_kept, masked, {"loss_denominator": lambda t: t["kept"].sum()}),
        (lambda y, t: (y - t).square().sum(), target, {"reduction": "sum"}),
    ):
        ours, theirs = ([layer.double() for layer in mlp()] for _ in range(2))
        found = Pipeline(
            ours,
            schedule=made("1f1b", 2, 3),
            group=ALONE,
            loss=loss,
            config=PipelineConfig(**options),
        ).step(x, wanted, scale=0.5)
        expected = loss(nn.Sequential(*theirs)(x), wanted)
        (expected * 0.5).backward()
        torch.testing.assert_close(found, expected.detach().float())
        for a, b in zip(gradients(ours), gradients(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputation_draws_the_same_dropout(recompute: str):
    x, target = batch(9)
    found = []
    for mode in ("never", recompute):
        layers = mlp(dropout=0.5)
        torch.manual_seed(5)
        Pipeline(layers, schedule=made("gpipe", 2, 3, mode), group=ALONE, loss=mse).step(x, target)
        found.append((gradients(layers), torch.rand(3)))
    (plain, drawn), (again, drawn_again) = found
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert torch.equal(drawn, drawn_again)


def test_gradients_accumulate_over_steps():
    x, target = batch(8)
    ours, theirs = mlp(), mlp()
    pipeline = Pipeline(ours, schedule=made("zb1p", 2, 2), group=ALONE, loss=mse)
    for part, wanted in zip(x.split(4), target.split(4), strict=True):
        pipeline.step(part, wanted, scale=0.5)
    mse(nn.Sequential(*theirs)(x), target).backward()
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_frozen_beginning_and_a_stage_without_parameters():
    x, target = batch(6)
    found = []
    for piped in (True, False):
        layers = [*mlp(2), nn.Tanh(), *mlp(1)]
        layers[0].requires_grad_(False)
        if piped:
            Pipeline(
                layers,
                schedule=made("1f1b", 4, 3),
                group=ALONE,
                loss=mse,
                config=PipelineConfig(boundaries=[0, 1, 2, 3, 4]),
            ).step(x, target)
        else:
            mse(nn.Sequential(*layers)(x), target).backward()
        assert all(p.grad is None for p in layers[0].parameters())
        found.append(gradients([layers[1], layers[3]]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_recorded_step_is_a_linear_extension():
    x, target = batch(8)
    plan = made("1f1b", 3, 4, "except_last")
    pipeline = Pipeline(mlp(), schedule=plan, group=ALONE, loss=mse)
    with pipeline.recording() as timelines:
        pipeline.step(x, target)
    times = timelines[0].actions
    assert set(times) == {action for _, action in plan}
    for _, action in plan:
        assert all(times[need][1] <= times[action][0] for need in plan.needs(action))


def wrong_on_one(rank: int, group: Any) -> list[str]:
    x, target = batch(10)
    pipeline = Pipeline(mlp(), schedule=made("1f1b", 2, 3), group=group, loss=mse)
    messages = []

    class Breaks(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ArithmeticError("no such number")

    for attempt in ("few rows", "breaks", "cannot be sent", "fine"):
        stage = next(iter(pipeline.stages.values()))
        layers = list(stage.layers)
        if attempt == "breaks" and rank == 1:
            stage.layers[0] = Breaks()
        if attempt == "cannot be sent" and rank == 0:
            stage.layers[-1] = type("Odd", (nn.Module,), {"forward": lambda self, x: {1, 2}})()
        try:
            pipeline.step(x[:2] if attempt == "few rows" and rank == 0 else x, target)
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        stage.layers[:] = layers
    return messages


def test_what_goes_wrong_on_one_rank_is_raised_on_all_and_the_next_step_works(world):
    first, second = world(2).run(wrong_on_one)
    assert "2 rows" in first[0]
    assert "rank 0" in second[0]
    assert "2 rows" in second[0]
    assert "no such number" in second[1]
    assert "rank 1" in first[1]
    assert "1F0" in first[1]
    assert "set" in first[2]
    assert "can't be sent" in second[2]
    assert first[3] == second[3] == ""


def test_refusals():
    with pytest.raises(ValueError, match="boundaries is"):
        Pipeline(
            mlp(4),
            schedule=made("gpipe", 2, 1),
            group=ALONE,
            loss=mse,
            config=PipelineConfig(boundaries=[0, 4]),
        )
    with pytest.raises(ValueError, match="can't fill 4 stages"):
        Pipeline(mlp(3), schedule=made("gpipe", 4, 1), group=ALONE, loss=mse)
    with pytest.raises(ValueError, match="reduction"):
        Pipeline(
            mlp(4),
            schedule=made("gpipe", 2, 1),
            group=ALONE,
            loss=mse,
            config=PipelineConfig(reduction="max"),
        )
    pipeline = Pipeline(mlp(4), schedule=made("gpipe", 2, 4), group=ALONE, loss=mse)
    with pytest.raises(ValueError, match="4 rows or more"):
        pipeline.step(*batch(3))
    with pytest.raises(ValueError, match="needs the target"):
        pipeline.step(batch(4)[0])


def hurried(rank: int, group: Any) -> None:
    """All forwards at once, of messages that together are many times a mailbox."""
    x, target = batch(64 * 8, width=64)
    plan = made("gpipe", 2, 64)
    ours, theirs = mlp(4, width=64), mlp(4, width=64)
    pipeline = Pipeline(ours, schedule=plan, group=group, loss=mse)
    if rank == 1:
        time.sleep(0.2)
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.step(x, target)
    expected = sequential_step(theirs, plan, pipeline.boundaries, x, target, mse)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    named = dict(nn.Sequential(*theirs).named_parameters())
    assert all(torch.equal(p.grad, named[n].grad) for n, p in pipeline.named_parameters())


def test_messages_that_a_mailbox_has_no_room_for_wait_their_turn(world):
    world(2).run(in_small_mailboxes)


def in_small_mailboxes(rank: int, group: Any) -> None:
    native = mailboxes.native
    small = type(
        "Native",
        (),
        {"Mailbox": staticmethod(lambda name, writes: native().Mailbox(name, writes, 8192))},
    )
    mailboxes.native = lambda: small
    try:
        hurried(rank, group)
    finally:
        mailboxes.native = native
    mailboxes.native = lambda: None  # and without any
    try:
        hurried(rank, group)
    finally:
        mailboxes.native = native


@contextlib.contextmanager
def tensors_apart() -> Iterator[None]:
    """As on GPUs with NCCL: tensors go by groups of their own."""
    device_groups = links._device_groups
    links._device_groups = lambda channels, *, group, device, tag: links._pairs(
        channels, group=group, backend="gloo", tag=tag
    )
    try:
        yield
    finally:
        links._device_groups = device_groups


def from_device_to_device(rank: int, group: Any) -> None:
    with tensors_apart():
        for name in ("1f1b", "zbv"):
            over_ranks(rank, group, name, 2, 5, "except_last")
        several(rank, group)
        assert all(bool(m) == (attempt < 3) for attempt, m in enumerate(wrong_on_one(rank, group)))


def test_tensors_apart_from_their_messages(world):
    world(2).run(from_device_to_device)


def four_from_device_to_device(rank: int, group: Any) -> None:
    files = []
    with tensors_apart():
        for _ in range(2):
            over_ranks(rank, group, "1f1b", 4, 5, "except_last")
            files.append(len(os.listdir("/proc/self/fd")))
    assert files[1] <= files[0], "a closed pipeline keeps its groups"


def test_tensors_apart_over_four_ranks(world):
    """Where the ranks between have more channels than those at the ends."""
    world(4).run(four_from_device_to_device)
