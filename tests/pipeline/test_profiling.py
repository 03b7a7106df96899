"""What a profile says of bytes is what is there, its costs are sums over stages, and it leaves the
model as it was."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.deferred import is_marked
from pyops.pipeline import Costs, LayerCosts, Profile, balance, profile, schedule, simulate, skip
from pyops.pipeline.runtime import executor

pytestmark = pytest.mark.cpu_only


class Pair(nn.Module):
    """Two values on, one of them no gradient's."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x * 2, torch.ones(x.shape[0], dtype=torch.bool)


class Shape(nn.Module):
    def forward(self, x: Tensor) -> str:
        return str(x.shape)


def by_hand(**lists: list[float]) -> Profile:
    """A profile of these numbers; weights and kept: bytes, none of them shared."""
    layers = []
    for i in range(len(next(iter(lists.values())))):
        fields = {key: values[i] for key, values in lists.items()}
        for key in ("kept", "weights", "taken"):
            if key in fields:
                fields[key] = ((i, fields[key]),)
        layers.append(LayerCosts(**fields))  # type: ignore[arg-type]
    return Profile(tuple(layers))


def test_bytes_of_layers_that_can_be_counted():
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()]
    found = profile(layers, torch.randn(5, 8), rounds=1, warmup=0)
    assert [layer.activation for layer in found.layers] == [
        5 * 16 * 4,
        5 * 16 * 4,
        5 * 4 * 4,
        5 * 4 * 4,
    ]
    assert [layer.parameters for layer in found.layers] == [8 * 16 + 16, 0, 16 * 4 + 4, 0]
    # ReLU and Tanh keep their outputs; the second Linear keeps ReLU's, too, which is there once;
    # the batch is the caller's
    assert [found.kept(i, i + 1) for i in range(4)] == [0, 320 + 320, 320, 80 + 80]
    assert found.kept(1, 3) == 320 + 320
    assert found.kept(0, 4) == 320 + 80
    assert found.weights(0, 4) == (2 * 4 + 8) * (8 * 16 + 16 + 16 * 4 + 4)
    assert found.weights(0, 4, optimizer_bytes=0) == 2 * 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_kept_is_what_the_allocator_says():
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
        for _ in range(3)
    ]
    x = torch.randn(16, 64)
    found = profile(layers, x, rounds=1, warmup=0)

    def forward() -> Tensor:
        y = x.clone().requires_grad_()
        for layer in layers:
            y = layer(y)
        return y

    forward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        y = forward()
    there = sum(event.self_cpu_memory_usage for event in seen.events())
    outside = 2 * 16 * 64 * 4  # the copy of x, and the last output, which no layer keeps
    assert y.requires_grad
    assert abs(there - outside - found.kept(0, 3)) <= 3 * 2 * 64  # allocations are rounded up


def test_shared_weights_are_there_once():
    tied = nn.Linear(8, 8, bias=False)
    found = profile([tied, nn.Tanh(), tied], torch.randn(2, 8), rounds=1, warmup=0)
    assert found.weights(0, 3) == 16 * 64
    assert found.weights(0, 1) + found.weights(2, 3) == 2 * 16 * 64


class Clock:
    """Stands in for the time: layers move it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        clock.now += forward
        ctx.clock, ctx.seconds = clock, backward
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return gradient, None, None, None


class Takes(nn.Module):
    """So many seconds of forward, of the input's gradient, and of the weight's, which can be put
    off."""

    def __init__(self, clock: Clock, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.seconds, self.clock, self.linear = (
            (forward, inputs, weights),
            clock,
            nn.Linear(2, 2, bias=False),
        )
        self.linear.weight.register_post_accumulate_grad_hook(self.weights)

    def weights(self, _: Tensor) -> None:
        self.clock.now += self.seconds[2]

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 0.5 * is_marked(
            self.linear.weight
        )  # a layer whose weight gradient may be put off takes longer
        return self.linear(Work.apply(x, self.clock, *self.seconds[:2]))


@pytest.mark.parametrize("rounds", [1, 4])
def test_every_layer_is_given_its_own_time(monkeypatch: pytest.MonkeyPatch, rounds: int):
    clock = Clock()
    monkeypatch.setattr(executor, "time", clock)
    layers = [Takes(clock, 1, 2, 4), Takes(clock, 8, 16, 32), Takes(clock, 64, 128, 256)]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        clock.now += 512
        return (y - target).sum()

    found = profile(
        layers,
        torch.zeros(3, 2, requires_grad=True),
        loss=loss,
        target=torch.zeros(3, 2),
        rounds=rounds,
    )
    assert [layer.forward for layer in found.layers] == [1, 8, 64 + 512]
    assert [layer.forward_apart for layer in found.layers] == [1.5, 8.5, 64.5 + 512]
    assert [layer.backward for layer in found.layers] == [4, 48, 384]  # the batch wants no gradient
    assert [layer.input_gradient for layer in found.layers] == [0, 16, 128]
    assert [layer.weight_gradient for layer in found.layers] == [4, 32, 256]
    assert [layer.deferred_weight_grad for layer in found.layers] == [
        2 * 3 * 2 * 4
    ] * 3  # x and dy of the Linear


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Pair(), nn.Identity()]
    layers[4] = Take()
    layers[0].weight.grad = torch.full((4, 4), 7.0)
    layers[0].weight.main_grad = torch.full((4, 4), 3.0)
    before = [t.clone() for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    state = torch.get_rng_state()
    x = torch.randn(6, 4, requires_grad=True)
    torch.set_rng_state(state)
    found = profile(
        layers, x, rounds=1, loss=lambda y, t: (y - t).square().mean(), target=torch.zeros(6, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    after = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    assert all(map(torch.equal, before, after))
    assert torch.equal(layers[0].weight.grad, torch.full((4, 4), 7.0))
    assert torch.equal(layers[0].weight.main_grad, torch.full((4, 4), 3.0))
    assert layers[0].bias.grad is None
    assert "forward" not in layers[0].__dict__
    assert not hasattr(layers[0].weight, "deferred")
    assert x.grad is None
    assert found.layers[3].activation == 6 * 4 * 4 + 6


class Take(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask[:, None]


def test_costs_are_sums_over_stages():
    found = by_hand(
        forward=[1.0, 2, 3, 4],
        backward=[2.0, 4, 6, 9],
        forward_apart=[1.0, 2, 3, 5],
        input_gradient=[1.0, 2, 3, 4],
        weight_gradient=[1.0, 2, 3, 4],
        activation=[10, 20, 30, 40],
        kept=[100, 200, 300, 400],
        deferred_weight_grad=[50, 60, 70, 80],
        weights=[8, 8, 8, 8],
        parameters=[2, 2, 2, 2],
    )
    costs = found.costs([0, 1, 4], split=True, latency=0.5, bandwidth=2.0)
    assert (costs.forward, costs.input_gradient, costs.weight_gradient) == ([1, 10], [1, 9], [1, 9])
    assert costs.deferred_weight_grad == [50, 210]
    assert (costs.activation, costs.kept, costs.weights) == ([10, 40], [100, 900], [32, 96])
    assert (costs.latency, costs.bandwidth) == (0.5, 2.0)
    whole = found.costs([0, 1, 4])
    assert whole.forward == [1, 9]
    assert [a + b for a, b in zip(whole.input_gradient, whole.weight_gradient, strict=True)] == [
        2,
        19,
    ]  # type: ignore[arg-type]
    timeline = simulate(schedule("1f1b", num_stages=2, num_microbatches=4), costs)
    assert timeline.memory == (32 + 2 * 100, 96 + 900)


@pytest.mark.parametrize("bounds", [[0, 4, 2], [1, 4], [0, 3], [0, 2, 2, 4], [0]])
def test_boundaries_that_leave_layers_out_are_refused(bounds: list[int]):
    with pytest.raises(ValueError, match="last 4, the number of layers"):
        by_hand(forward=[1.0] * 4).costs(bounds)


def test_a_file_has_all_of_it(tmp_path: Path):
    found = profile([nn.Linear(3, 3), nn.Tanh()], torch.randn(2, 3), rounds=1)
    assert Profile.load(found.save(tmp_path / "deep" / "p.json")) == found
    (tmp_path / "x.json").write_text('{"layers": [{"speed": 1}], "facts": {}}')
    with pytest.raises(ValueError, match=r"x\.json is no profile"):
        Profile.load(tmp_path / "x.json")


def test_balance_takes_a_profile_or_layers():
    found = by_hand(
        forward=[1.0, 1, 1, 9],
        backward=[0.0] * 4,
        parameters=[9, 1, 1, 1],
        weights=[36, 4, 4, 4],
        kept=[0, 1000, 1000, 0],
    )
    assert balance(found, num_stages=2) == [0, 3, 4]
    assert balance(found, num_stages=2, by="parameters") == [0, 1, 4]
    assert balance(found, num_stages=2, by="memory") == [0, 2, 4]
    assert balance(found, num_stages=2, by=lambda layer: 1.0 if layer.forward == 9 else 2.0) == [
        0,
        2,
        4,
    ]
    layers = [nn.Linear(9, 9), nn.Linear(2, 2), nn.Linear(2, 2)]
    assert balance(layers, num_stages=2) == [0, 1, 3]
    assert balance(
        layers, num_stages=2, by=lambda layer: 1.0 if layer.in_features == 2 else 0.0
    ) == [0, 2, 3]


def test_memory_counts_what_is_in_flight_and_bounds_a_partition():
    found = by_hand(forward=[1.0] * 6, backward=[1.0] * 6, kept=[10] * 6, weights=[0] * 6)
    assert balance(found, num_stages=3, by="memory") == [0, 2, 4, 6]
    made = schedule("1f1b", num_stages=3, num_microbatches=8)
    flying = [made.peak(rank) for rank in range(3)]
    assert balance(found, num_stages=3, by="memory", in_flight=flying) == [0, 1, 2, 6]
    assert balance(found, num_stages=3, in_flight=flying, most_bytes=60) == [0, 2, 4, 6]
    assert balance(found, num_stages=3, in_flight=flying, most_bytes=50) == [0, 1, 3, 6]
    with pytest.raises(ValueError, match="no partition keeps every stage within most_bytes"):
        balance(found, num_stages=3, in_flight=flying, most_bytes=29)


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ([1.0, 2.0], {"by": "time"}, "by is 'time', but the costs are numbers"),
        ("profile", {"by": "speed"}, "by is 'speed'; choose one of time, parameters, memory"),
        ("layers", {"by": "time"}, "by is 'time', which layers don't tell"),
        ([1.0, 2.0], {"most_bytes": 5}, "known of a Profile alone"),
        ("profile", {"in_flight": [1, 1]}, "goes with by="),
        (
            "profile",
            {"in_flight": [1], "by": "memory"},
            "in_flight has 1 numbers, but there are 2 stages",
        ),
    ],
)
def test_what_balance_cannot_weigh_is_refused(
    costs: object, options: dict[str, object], message: str
):
    given = {"profile": by_hand(forward=[1.0, 1.0]), "layers": [nn.Tanh(), nn.Tanh()]}.get(
        str(costs), costs
    )
    with pytest.raises(ValueError, match=message):
        balance(given, num_stages=2, **options)  # type: ignore[arg-type]


def test_what_cannot_be_profiled_is_refused():
    with pytest.raises(ValueError, match="no layers to profile"):
        profile([], torch.zeros(1))
    with pytest.raises(ValueError, match="rounds is 0"):
        profile([nn.Linear(1, 1)], torch.zeros(1), rounds=0)

    with pytest.raises(
        TypeError, match=r"layer 1 \(Shape\) gave str, which has no tensor to send on"
    ):
        profile([nn.Linear(1, 1), Shape()], torch.zeros(1))
    with pytest.raises(ValueError, match="nothing to train"):
        profile([nn.Tanh()], torch.zeros(1))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.sum(1)


class Up(nn.Module):
    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return x * skipped[:, None]


def test_what_skips_stages_is_seen(tmp_path: Path):
    layers = [nn.Linear(4, 4), skip(Down(), stash="a"), nn.Tanh(), skip(Up(), pop="a")]
    found = profile(layers, torch.randn(5, 4), rounds=1)
    assert [layer.activation for layer in found.layers] == [80, 160, 160, 160]
    assert found.skips == ((1, 3, 20),)
    assert found.kept(3, 4) == 160 + 20  # x and what was skipped are both factors
    assert found.costs([0, 1, 2, 3, 4]).skipped == {(1, 3): 20}
    assert found.costs([0, 1, 4]).skipped == {}
    assert found.costs([0, 2, 4]).skipped == {(0, 1): 20}
    assert Profile.load(found.save(tmp_path / "p.json")) == found


def at_the_same_time(rank: int, group: Any) -> None:
    layers = [nn.Linear(4, 4), nn.Tanh()]
    found = profile(layers, torch.randn(3, 4), rounds=1, group=group)
    assert len(set(gather(found, group=group))) == 1
    assert dict(found.facts)["ranks"] == "2"
    alone = [
        sys.modules["pyops.pipeline.profiling"]
        ._ProfileRun(layers, torch.zeros(3, 4), None, None, {})
        .bytes_of()
    ]
    assert found.layers[1].kept == alone[0][0][1]["kept"]
    with pytest.raises(
        TypeError, match="which has no tensor to send on"
    ):  # on both, though one has it
        profile([nn.Linear(1, 1), Shape() if rank else nn.Tanh()], torch.zeros(1, 1), group=group)
    with pytest.raises(ValueError, match="the ranks have different layers"):
        profile([nn.Linear(1, 1), nn.GELU() if rank else nn.Tanh()], torch.zeros(1, 1), group=group)


def test_ranks_measure_together_and_agree(world: Any):
    world(2).run(at_the_same_time)


def test_the_parts_of_every_partition_add_up():
    found = by_hand(forward=[1.0, 2, 4, 8], backward=[3.0, 5, 7, 11], kept=[1, 2, 4, 8])
    for k in range(1, 5):
        for cuts in itertools.combinations(range(1, 4), k - 1):
            costs: Costs = found.costs([0, *cuts, 4])
            assert sum(costs.forward) == 15  # type: ignore[arg-type]
            assert sum(costs.input_gradient) + sum(costs.weight_gradient) == 26  # type: ignore[arg-type]
