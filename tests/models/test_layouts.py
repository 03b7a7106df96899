"""Every model computes the same on one rank and on several, with sequence parallelism or without,
dropout included."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.grids import cut, full
from tests.models.families import FAMILIES, gradients, losses, make

pytestmark = pytest.mark.on_device

LAYOUTS = [(2, False), (2, True), (4, False), (4, True)]
STEPS = 12  # 50 under `-m full`


def run_gradients(rank: int, group: Any, sequence_parallel: bool) -> dict[str, Any]:
    return {
        name: gradients(
            make(name, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64),
            group=group,
        )
        for name in FAMILIES
    }


def run_losses(
    rank: int, group: Any, steps: int, sequence_parallel: bool
) -> dict[str, list[float]]:
    return {
        name: losses(
            make(name, num_layers=1, group=group, sequence_parallel=sequence_parallel),
            steps=steps,
            group=group,
        )
        for name in ("gpt", "bert", "t5", "vit")
    }


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As the ranks have; several cost more than they bring for tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(one_thread) -> dict[str, Any]:
    return run_gradients(0, None, False)


@functools.cache
def curves(steps: int) -> dict[str, list[float]]:
    return run_losses(0, None, steps, False)


# Both of two ranks stand in the suite with dropout, below.
@pytest.mark.parametrize(("ranks", "sequence_parallel"), cut(LAYOUTS, keep=[(2, True)]))
def test_loss_and_gradients_are_those_of_one_rank(world, alone, ranks, sequence_parallel):
    found = world(ranks).run(run_gradients, sequence_parallel)
    for family, wanted in alone.items():
        for name, (shape, _, whole) in wanted.items():
            size = whole.abs().max().item()
            assert size > 1e-9 or "qkv.bias" in name, (
                f"{family}: {name} gets no gradient, so this shows nothing"
            )
            held = torch.zeros(shape)
            for parts in found:
                there, offset, part = parts[family][name]
                assert there == shape
                where = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                held[where] += 1
                error = (part - whole[where]).abs().max().item() if part.numel() else 0.0
                assert error <= 1e-12 * max(size, 1.0), (family, name, error)
            assert (held > 0).all(), f"{family}: no rank holds some of {name}"


@pytest.mark.full
@pytest.mark.parametrize("steps", [STEPS, full(50)])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), cut(LAYOUTS, keep=[(2, False), (2, True)]))
def test_loss_curves_with_dropout_are_those_of_one_rank(
    world, one_thread, steps, ranks, sequence_parallel
):
    found = world(ranks).run(run_losses, steps, sequence_parallel, timeout=180.0)
    for family, wanted in curves(steps).items():
        assert wanted[-1] < wanted[0] - 0.3, (
            f"{family} learns nothing, so this shows nothing: {wanted}"
        )
        for rank, curve in enumerate(run[family] for run in found):
            errors = [abs(f - w) for f, w in zip(curve, wanted, strict=True)]
            assert max(errors) <= 1e-5, (family, rank, max(errors))
