"""ZeroOptimizer: n ranks at any stage take the steps that one process takes with the whole
batch."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import cut, full
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, one_process, part

pytestmark = pytest.mark.on_device

STEPS = 6  # two of them without a layer that the others use
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def _train(
    rank: int,
    group: Any,
    stage: int,
    name: str,
    options: dict[str, Any],
    zero: dict[str, Any],
    accumulate: int = 1,
    mode: str = "",
    steps: int = STEPS,
) -> dict[str, Tensor]:
    """mode of accumulation: "no_sync", or "sync" for a reduction after every backward."""
    size = dist.get_world_size(group)
    model = Net(seed=rank, mixed=name.startswith("torch."))
    module = torch.optim if name.startswith("torch.") else pyops.optim
    cls = getattr(module, name.removeprefix("torch."))
    optimizer = zero_optimizer(
        model, cls, stage=stage, group=group, params=groups(model), **zero, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        x, y = part(step, rank, size)
        pieces = list(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True))
        for i, (a, b) in enumerate(pieces):
            quiet = mode == "no_sync" and i + 1 < len(pieces)
            with optimizer.no_sync() if quiet else contextlib.nullcontext():
                (mean_loss(model, a, b, sometimes=step % 3 == 0) / accumulate).backward()
        optimizer.step()
    with optimizer.whole_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _compare(
    found: list[dict[str, Tensor]],
    expected: dict[str, Tensor],
    *,
    rtol: float = 2e-5,
    atol: float = 2e-6,
) -> None:
    start = Net().state_dict()
    moved = sum(float((p - start[name]).abs().max()) > 1e-4 for name, p in expected.items())
    assert moved > 7, "parameters that don't move would prove nothing"
    for rank, parameters in enumerate(found):
        for name, p in parameters.items():
            torch.testing.assert_close(
                p,
                expected[name],
                rtol=rtol,
                atol=atol,
                msg=lambda m, n=name, r=rank: f"{n} of {r}: {m}",
            )
            assert torch.equal(p, found[0][name]), f"{name} differs between ranks"


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return one_process(lambda g: torch.optim.AdamW(g, **OPTIONS), steps=STEPS, sometimes_every=3)


# mode of accumulation: (backwards, whether reductions overlap with backward)
MODES = {"": (1, True), "no_sync": (2, False), "sync": (2, True)}
GRID = [
    (size, bucket_bytes, stage, mode)
    for stage in (0, 1, 2, 3)
    for size, bucket_bytes in ((1, 3000), (2, 1), (2, 3000), (2, 1 << 20), (3, 3000))
    for mode in MODES
]
# Each stage, both ways to accumulate, and each size where it does most: three ranks share nothing
# out evenly, alone there is nothing to gather, a bucket for each parameter is a unit's own.
# test_any_optimizer takes one backward for each step, on three ranks.
KEPT = [
    *((3, 3000, 3, "no_sync"), (2, 1, 2, "sync"), (2, 1 << 20, 1, "no_sync")),
    *((1, 3000, 3, "sync"), (2, 3000, 0, "sync")),
]


@pytest.mark.parametrize(("size", "bucket_bytes", "stage", "mode"), cut(GRID, keep=KEPT))
def test_equals_one_process(world, expected, size: int, stage: int, bucket_bytes: int, mode: str):
    accumulate, overlap = MODES[mode]
    zero = {"bucket_bytes": bucket_bytes, "overlap_grad_reduce": overlap}
    found = world(size).run(_train, stage, "torch.AdamW", OPTIONS, zero, accumulate, mode)
    _compare(found, expected)


@pytest.mark.parametrize("stage", [full(0), full(1), full(2), 3])
def test_bucket_sizes_do_not_change_a_bit(world, stage: int):
    options = {"max_grad_norm": None}
    found = [
        world(3).run(
            _train, stage, "torch.AdamW", OPTIONS, {"bucket_bytes": size, **options}, 1, "", 4
        )[0]
        for size in (1, 2000, 1 << 20)
    ]
    for other in found[1:]:
        for name, p in found[0].items():
            assert torch.equal(p, other[name]), name


def test_stages_give_the_same_bits(world):
    found = [
        world(3).run(_train, stage, "AdamW", OPTIONS, {"bucket_bytes": 2000})[0]
        for stage in (0, 1, 2, 3)
    ]
    for other in found[1:]:
        for name, p in found[0].items():
            assert torch.equal(p, other[name]), name


OPTIMIZERS = [
    ("AdamW", OPTIONS), ("Adam", {"lr": 1e-2, "amsgrad": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Lion", {"lr": 1e-3}),
    ("Adagrad", {"lr": 1e-2}), ("LAMB", {"lr": 1e-2}), ("LARS", {"lr": 1.0}),
    ("Adafactor", {"lr": 0.1, "weight_decay": 0.1, "d": 1.1}), ("torch.SGD", {"lr": 0.2}),
    ("torch.RMSprop", {"lr": 1e-3}), ("torch.NAdam", {"lr": 1e-3}),
    ("torch.AdamW", {"lr": 1e-3, "fused": True}),
]  # fmt: skip


# Gradients are clipped before any optimizer sees them, so the suite has half of the optimizers with
# it and half without; Lion, which takes the sign alone, would not show it.
CLIPPED = {"AdamW", "SGD", "Adagrad", "LARS", "torch.SGD", "torch.NAdam"}
# Those that look at whole tensors, of which a rank has a part: together at every stage in the
# suite. To the others the parts are the same at stages 1 and 2 as at 3; of those that keep the same
# kinds of states as another, the suite has that one.
IN_SUITE = {"LAMB": (1, 3), "LARS": (2,), "Adafactor": (2, 3)}
LEFT_OUT = {"Adam", "Adagrad", "torch.SGD", "torch.NAdam"}


def stages_of(name: str, *, clipped: bool) -> list[Any]:
    """(stages, marks) of an optimizer: what the suite has, and the rest under `-m full`."""
    if (name in CLIPPED) != clipped:
        return [((1, 2, 3), full)]
    in_suite = IN_SUITE.get(name, (3,))
    others = tuple(stage for stage in (1, 2, 3) if stage not in in_suite)
    return [(in_suite, full if name in LEFT_OUT else pytest.param), (others, full)]


@pytest.mark.parametrize(
    ("name", "options", "max_grad_norm", "stages"),
    [
        kind(name, options, norm, stages, id=f"{name}-{norm}-{stages}")
        for (name, options), norm in itertools.product(OPTIMIZERS, (None, 0.1))
        for stages, kind in stages_of(name, clipped=norm is not None)
    ],
)
def test_any_optimizer(
    world, name: str, options: dict[str, Any], max_grad_norm: float | None, stages: tuple[int, ...]
):
    module = torch.optim if name.startswith("torch.") else pyops.optim
    cls = getattr(module, name.removeprefix("torch."))
    mixed = name.startswith("torch.")
    expected = one_process(
        lambda g: cls(g, **options),
        steps=6,
        sometimes_every=3,
        max_grad_norm=max_grad_norm,
        mixed=mixed,
    )
    for stage in stages:
        found = world(3).run(
            _train,
            stage,
            name,
            options,
            {"bucket_bytes": 2000, "max_grad_norm": max_grad_norm},
            1,
            "",
            6,
        )
        _compare(found, expected, rtol=1e-4, atol=1e-5)


def _rounded(rank: int, group: Any, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model = Net(seed=rank, mixed=False).bfloat16()
    zero = zero_optimizer(
        model, pyops.optim.AdamW, stage=stage, bucket_bytes=900, group=group, lr=1e-2, **options
    )
    for step in range(4):
        x, y = part(step, rank, dist.get_world_size(group))
        mean_loss(model, x.bfloat16(), y.bfloat16(), sometimes=step % 2 == 0).backward()
        zero.step()
    with zero.whole_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


ROUNDING = {
    "masters": {},
    "stochastic": {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
}


# Random bits belong to an element, wherever it lies: at stages 1 and 3 it does in two ways. Masters
# are compared with a step by hand in update/test_precision_plan.py.
@pytest.mark.parametrize(
    ("rounding", "stages"),
    [
        full("masters", (2, 3)),
        full("masters", (1,)),
        ("stochastic", (1, 3)),
        full("stochastic", (2,)),
    ],
)
def test_16_bit_parameters_have_the_same_bits_at_every_stage(
    world, rounding: str, stages: tuple[int, ...]
):
    options = ROUNDING[rounding]
    expected = world(3).run(_rounded, 0, options)[0]
    for stage in stages:
        for found in world(3).run(_rounded, stage, options):
            for name, p in expected.items():
                assert torch.equal(found[name], p), (stage, name)


def _summed(rank: int, group: Any, op: str) -> dict[str, Tensor]:
    size = dist.get_world_size(group)
    model = Net(mixed=False)
    zero = ZeroOptimizer(
        model, pyops.optim.SGD, ZeroConfig(stage=2, reduction=op), group=group, lr=0.1
    )
    (mean_loss(model, *part(0, rank, size)) / (size if op == "sum" else 1)).backward()
    zero.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_sum_of_losses_that_are_divided_is_the_mean(world):
    means, sums = (world(2).run(_summed, op)[0] for op in ("mean", "sum"))
    for name, p in means.items():
        torch.testing.assert_close(sums[name], p, rtol=1e-6, atol=1e-7)


def _one_sided(rank: int, group: Any, stage: int) -> dict[str, Tensor]:
    """A layer that only the last rank uses."""
    size = dist.get_world_size(group)
    model = Net(mixed=False)
    zero = zero_optimizer(
        model, torch.optim.AdamW, stage=stage, bucket_bytes=2000, group=group, **OPTIONS
    )
    for step in range(6):
        mean_loss(model, *part(step, rank, size), sometimes=rank == size - 1).backward()
        assert len(zero.reduced_gradients()) == len(zero.gradients.buckets)
        zero.step()
    with zero.whole_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [full(0), full(1), 2, 3])
def test_a_layer_that_one_rank_uses(world, stage: int):
    model = Net(mixed=False)
    plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
    for step in range(6):
        plain.zero_grad()
        for rank in range(3):
            (mean_loss(model, *part(step, rank, 3), sometimes=rank == 2) / 3).backward()
        plain.step()
    _compare(
        world(3).run(_one_sided, stage), {name: p.detach() for name, p in model.named_parameters()}
    )
