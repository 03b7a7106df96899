"""gradient_squares: each parameter's reduced gradient, squared and summed, as one process has
it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from pyops.elastic import Meter
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import full
from tests.zero.models import Net, mean_loss, part, rows

pytestmark = pytest.mark.on_device


def squares_body(rank, group, stage, quiet):
    """The squares at each of two steps, and the parameters afterwards; without asking, too."""
    found: list[dict[str, float]] = []
    ends = []
    for asks in (True, False):
        model = Net(mixed=stage < 2)
        zero = ZeroOptimizer(
            model, AdamW, ZeroConfig(stage=stage, bucket_bytes=1 << 10), group=group, lr=1e-2
        )
        for step in range(2):
            with zero.no_sync() if quiet else contextlib.nullcontext():
                mean_loss(model, *part(step, rank, 2), sometimes=step == 0).backward()
            if asks:
                squares = zero.gradient_squares()
                assert all(
                    each.dtype == torch.float64 and each.dim() == 0 for each in squares.values()
                )
                found.append({name: float(each) for name, each in squares.items()})
            zero.step()
            zero.zero_grad()
        with zero.whole_parameters():
            ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found, ends


def alone(mixed: bool) -> list[dict[str, float]]:
    model = Net(mixed=mixed)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        mean_loss(model, *rows(step), sometimes=step == 0).backward()
        gradients: dict[str, Tensor | None] = {
            name: p.grad for name, p in model.named_parameters() if p.requires_grad
        }
        found.append(
            {
                name: 0.0 if g is None else float(g.double().square().sum())
                for name, g in gradients.items()
            }
        )
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("stage", "quiet"),
    [(0, False), full(0, True), full(1, False), (1, True), (2, False), (3, False)],
)
def test_are_those_of_one_process(world, stage, quiet):
    (first, ends), (second, other_ends) = world(2).run(squares_body, stage, quiet)
    expected = alone(mixed=stage < 2)
    assert first == second
    for step in range(2):
        assert set(first[step]) == set(expected[step])
        for name, value in expected[step].items():
            assert first[step][name] == pytest.approx(value, rel=2e-5), (step, name)
        larger = [name for name, value in expected[step].items() if value > 1e-8]
        assert len(larger) > 10, "gradients of nothing would prove nothing"
    assert expected[1]["sometimes.weight"] == 0
    assert expected[0]["sometimes.weight"] > 0
    for with_asking, without in (ends, other_ends):
        assert all(torch.equal(with_asking[name], without[name]) for name in without), (
            "asking changes nothing"
        )


def meter_body(rank, group):
    model = Net()
    zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=0), group=group, lr=1e-2)
    meter = Meter(
        [
            [name for name, _ in block.named_parameters(prefix=f"blocks.{i}")]
            for i, block in enumerate(model.blocks)
        ]
    )
    mean_loss(model, *part(0, rank, 2)).backward()
    meter.observe(zero.gradient_squares())
    return meter.take()


@pytest.mark.cpu_only
def test_a_meter_takes_them(world):
    model = Net()
    meter = Meter(list(model.blocks))
    mean_loss(model, *rows(0)).backward()
    meter.observe()
    expected = meter.take()
    first, second = world(2).run(meter_body)
    assert first == second == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 1e-4
