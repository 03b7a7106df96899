"""The meter: norms are those of the gradients, averaged over steps, alone and shared out over
ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.elastic import Meter

pytestmark = pytest.mark.cpu_only


def layers_of(count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(5, 5).double() for _ in range(count))


def step(layers: nn.ModuleList, seed: int, scale: float = 1.0) -> list[float]:
    """Backward; the squared norms by plain torch."""
    layers.zero_grad()
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for layer in layers:
        x = layer(x).tanh()
    (x.square().sum() * scale).backward()
    found = [
        sum(p.grad.square().sum().item() for p in layer.parameters() if p.grad is not None)
        for layer in layers
    ]
    return [each / scale**2 for each in found]


def test_is_the_mean_of_squares_over_steps():
    layers = layers_of()
    meter = Meter(list(layers))
    squares = []
    for seed, scale in enumerate([1.0, 1024.0, 8.0]):
        squares.append(step(layers, seed, scale))
        meter.observe(scale=scale)
    wanted = [math.sqrt(sum(each) / 3) for each in zip(*squares, strict=True)]
    found = meter.take()
    assert found == pytest.approx(wanted, rel=1e-12)
    assert min(found) > 0.01
    last = step(layers, 7)
    meter.observe()
    assert meter.take() == pytest.approx([math.sqrt(each) for each in last], rel=1e-12), (
        "begun anew"
    )


def test_frozen_layers_and_missing_gradients_are_nothing():
    layers = layers_of()
    meter = Meter(list(layers))
    step(layers, 0)
    layers[0].requires_grad_(False)  # its old gradient is still there
    layers[1].bias.grad = None
    meter.observe()
    found = meter.take()
    assert found[0] == 0
    assert found[1] == pytest.approx(layers[1].weight.grad.norm().item(), rel=1e-12)


def test_main_grad_counts_before_grad():
    layers = layers_of(1)
    layers[0].weight.main_grad = torch.full((5, 5), 2.0, dtype=torch.float64)
    meter = Meter(list(layers))
    meter.observe()
    assert meter.take() == [10.0]


def test_16_bit_gradients_are_squared_in_more():
    weight = nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    weight.grad = torch.full((1000,), 30000.0, dtype=torch.float16)
    meter = Meter([[weight]])
    meter.observe()
    assert meter.take() == pytest.approx([30000.0 * math.sqrt(1000)], rel=1e-6)


def test_a_step_that_overflowed_does_not_count():
    layers = layers_of()
    meter = Meter(list(layers))
    squares = step(layers, 0)
    meter.observe()
    step(layers, 1)
    layers[2].bias.grad[0] = float("inf")
    meter.observe()
    assert meter.take() == pytest.approx([math.sqrt(each) for each in squares], rel=1e-12)


def test_no_step_is_an_error():
    meter = Meter(list(layers_of()))
    with pytest.raises(ValueError, match="no step was measured with finite gradients"):
        meter.take()
    with pytest.raises(ValueError, match="no layers to measure"):
        Meter([])


def test_state():
    layers = layers_of()
    meter, other = Meter(list(layers)), Meter(list(layers))
    step(layers, 0)
    meter.observe()
    other.load_state_dict(meter.state_dict())
    step(layers, 1)
    meter.observe()
    other.observe()
    assert meter.take() == other.take()
    with pytest.raises(ValueError, match="of 3 layers, but there are 2"):
        Meter(list(layers_of(2))).load_state_dict(meter.state_dict())


def _shared(rank: int, group: dist.ProcessGroup) -> tuple[list[float], list[float], str]:
    layers = layers_of()
    squares = step(layers, 0)
    own = Meter([layer if (i == 2) == (rank == 1) else [] for i, layer in enumerate(layers)])
    own.observe()
    found = own.take(group=group, shared=True)
    if rank == 0:
        own.observe()
    with pytest.raises(ValueError) as caught:
        own.take(group=group, shared=True)
    return found, [math.sqrt(each) for each in squares], str(caught.value)


def test_layers_of_a_pipelines_ranks(world):
    for found, wanted, message in world(2).run(_shared):
        assert found == pytest.approx(wanted, rel=1e-12)
        assert message.startswith("rank 1 measured no step")


def test_squares_by_name():
    names = [["a.weight", "a.bias"], ["b.weight"], []]
    meter = Meter(names)
    three, four, one = (torch.tensor(x, dtype=torch.float64) for x in (9.0, 16.0, 4.0))
    meter.observe({"a.weight": three, "a.bias": four, "b.weight": one, "head": one}, scale=2.0)
    assert meter.take() == [2.5, 1.0, 0.0]
    meter.observe({"b.weight": one})
    assert meter.take() == [0.0, 2.0, 0.0], "a is frozen"


def test_names_go_with_squares_and_parameters_without():
    one = torch.ones((), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"names of parameters, so observe\(\) needs their squares"
    ):
        Meter([["a"]]).observe()
    with pytest.raises(ValueError, match="parameters, not names"):
        Meter(list(layers_of())).observe({"a": one})
    with pytest.raises(ValueError, match="squares of b, but the layers have a"):
        Meter([["a"]]).observe({"b": one})
    meter = Meter([[], []])
    meter.observe({"elsewhere": one})
    assert meter.take() == [0.0, 0.0], "a rank of a pipeline that holds no block"
