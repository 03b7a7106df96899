"""Skip connections between any stages: gradients with the bits of plain torch, transfers that go
directly, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import (
    Costs,
    Pipeline,
    PipelineConfig,
    Transfer,
    balance,
    schedule,
    simulate,
    skip,
    skip_pairs,
)
from tests.grids import full
from tests.pipeline.reference import batch, sequential_step

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb1p", "interleaved_zb", "zbv")


class Down(nn.Module):
    """Puts away its activation; and, where it shall, how many rows there were, and nothing."""

    def __init__(self, *, notes: bool = False) -> None:
        super().__init__()
        self.linear, self.notes = nn.Linear(8, 8), notes

    def forward(self, x: Any) -> Any:
        a = torch.tanh(self.linear(x))
        return (
            (0.5 * a, a, {"rows": len(x), "twice": (a * 2, None)}, None)
            if self.notes
            else (0.5 * a, a)
        )


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Any, a: Any, note: Any = None, nothing: Any = None) -> Any:
        assert nothing is None
        if note is not None:
            assert note["rows"] == len(x)
            x = x + note["twice"][0]
        return self.drop(torch.tanh(self.linear(x))) + a


class Plain(nn.Module):
    """The same layers, called as anybody would."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        held: dict[str, Any] = {}
        for layer in self.layers:
            x = layer(x, *(held.pop(name) for name in getattr(layer, "pops", ())))
            if names := getattr(layer, "stashes", ()):
                x, *several = x
                held.update(zip(names, several, strict=True))
        return x


def unet() -> list[nn.Module]:
    """8 layers: 0, 1, 2 are taken by 7, 6, 4; and layer 3 by 5."""
    torch.manual_seed(2)
    return [
        skip(Down(), stash="a"),
        skip(Down(notes=True), stash=("b", "note", "none")),
        skip(Down(), stash="c"),
        skip(Down(), stash="d"),
        skip(Up(), pop="c"),
        skip(Up(), pop=["d"]),
        skip(Up(), pop=("b", "note", "none")),
        skip(Up(), pop="a"),
    ]


def without_dropout(layers: list[nn.Module]) -> list[nn.Module]:
    for layer in layers:
        if isinstance(layer, Up):
            layer.drop.p = 0.0
    return layers


def expected(plan: Any, boundaries: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    layers, (x, target) = without_dropout(unet()), batch(10)
    plain = Plain(layers)
    loss = sequential_step_of(plain, layers, plan, boundaries, x, target)
    return loss, {
        f"{i}.{name}": p.grad
        for i, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    }


def sequential_step_of(
    plain: Plain, layers: list[nn.Module], plan: Any, boundaries: list[int], x: Any, target: Any
) -> Any:
    whole = Whole(plain, layers)
    return sequential_step(whole, plan, boundaries, x, target, mse)


class Whole(list):
    """Layers whose parameters are told apart, but which are called as one."""

    def __init__(self, plain: Plain, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.plain = plain

    def __iter__(self) -> Any:
        return iter([self.plain])


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_in_one_process_with_the_bits_of_plain_torch(name: str):
    for k, m, recompute in (
        (1, 2, "never"),
        (2, 3, "always"),
        (4, 3, "never"),
        (4, 5, "except_last"),
    ):
        plan = schedule(name, num_stages=k, num_microbatches=m).with_recompute(recompute)
        layers = without_dropout(unet())
        pipeline = Pipeline(layers, schedule=plan, group=ALONE, loss=mse)
        loss = pipeline.step(*batch(10))
        wanted, gradients = expected(plan, pipeline.boundaries)
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
        for n, p in pipeline.named_parameters():
            assert bool((p.grad != 0).any())
            assert torch.equal(p.grad, gradients[n]), (k, m, n)
        assert all(stage.num_in_flight == 0 for stage in pipeline.stages.values())


def over_ranks(
    rank: int, group: Any, name: str, m: int, recompute: str, boundaries: list[int] | None
) -> list[int]:
    plan = schedule(name, num_stages=group.size(), num_microbatches=m).with_recompute(recompute)
    pipeline = Pipeline(
        without_dropout(unet()),
        schedule=plan,
        group=group,
        loss=mse,
        config=PipelineConfig(boundaries=boundaries),
    )
    for rows in (10, 900, 7, 10):  # messages that grow and shrink
        pipeline.zero_grad()
        loss = pipeline.step(*batch(rows))
    wanted, gradients = expected(plan, pipeline.boundaries)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    for n, p in pipeline.named_parameters():
        assert bool((p.grad != 0).any())
        assert torch.equal(p.grad, gradients[n]), n
    y = pipeline(batch(10)[0])
    if pipeline.has_last:
        torch.testing.assert_close(y, Plain(without_dropout(unet()))(batch(10)[0]))
    with pipeline.recording() as timelines:
        pipeline.step(*batch(10))
    direct = [t for t in timelines[0].transfers if t.kind in ("FS", "BS")]
    assert direct
    assert all(plan.rank_of[t.source] != plan.rank_of[t.target] for t in direct)
    return [len(direct), len(timelines[0].transfers)]


@pytest.mark.parametrize(
    ("name", "ranks", "m", "recompute", "boundaries"),
    [
        full("1f1b", 2, 3, "never", None),
        ("zbv", 2, 4, "except_last", [0, 1, 2, 5, 8]),
        ("gpipe", 3, 4, "always", [0, 3, 5, 8]),
        full("interleaved", 2, 4, "always", None),
    ],
)
def test_over_ranks_with_the_bits_of_plain_torch(
    world, name: str, ranks: int, m: int, recompute: str, boundaries: list[int] | None
):
    several = world(ranks).run(over_ranks, name, m, recompute, boundaries)
    assert all(each == several[0] for each in several)


def test_recomputation_draws_the_same_dropout():
    found = []
    for mode in ("never", "always"):
        layers = unet()
        torch.manual_seed(5)
        plan = schedule("1f1b", num_stages=4, num_microbatches=3).with_recompute(mode)
        Pipeline(layers, schedule=plan, group=ALONE, loss=mse).step(*batch(9))
        found.append([p.grad for layer in layers for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_schedule_knows_its_skips():
    plan = schedule("1f1b", num_stages=4, num_microbatches=6).with_skips([(0, 3), (1, 2), (0, 3)])
    assert plan.skips == ((0, 3), (1, 2))
    assert plan.with_recompute("always").skips == plan.forward_only().skips == plan.skips
    assert len(plan.transfers[0, 3, "FS"]) == len(plan.transfers[3, 0, "BS"]) == 6
    assert str(Transfer("FS", 0, 3, 5)) == "skip 0->3 of 5"
    free = simulate(plan, Costs())
    assert free.makespan == simulate(schedule("1f1b", num_stages=4, num_microbatches=6)).makespan
    slow = simulate(plan, Costs(skipped={(0, 3): 40.0}, bandwidth=1.0))
    assert free.transfers[Transfer("FS", 0, 3, 0)] == (1.0, 1.0)
    assert slow.transfers[Transfer("FS", 0, 3, 0)] == (1.0, 41.0)
    assert slow.makespan > free.makespan + 40
    for strange in ((2, 1), (0, 4), (1, 1)):
        with pytest.raises(ValueError, match="skips has"):
            plan.with_skips([strange])


def test_layers_can_be_kept_on_one_stage_instead():
    layers = unet()
    pairs = skip_pairs(layers)
    assert pairs == {
        "a": (0, 7),
        "b": (1, 6),
        "note": (1, 6),
        "none": (1, 6),
        "c": (2, 4),
        "d": (3, 5),
    }
    boundaries = balance([1.0] * 8, num_stages=3, together=[pairs["c"], pairs["d"]])
    pipeline = Pipeline(
        without_dropout(layers),
        schedule=schedule("1f1b", num_stages=3, num_microbatches=2),
        group=ALONE,
        loss=mse,
        config=PipelineConfig(boundaries=boundaries),
    )
    assert boundaries == [0, 2, 6, 8]
    assert pipeline.schedule.skips == ((0, 2),)
    pipeline.step(*batch(10))


@pytest.mark.parametrize(
    ("stash", "pop", "message"),
    [
        (["a", "a", ""], ["", "", "a"], "layers 0 and 1 both have 'a' among their stashes"),
        (["a", "", ""], ["", "a", "a"], "layers 1 and 2 both have 'a' among their pops"),
        (["a", "", ""], ["", "", ""], "layer 0 stashes 'a', which no layer pops"),
        (["", "", ""], ["", "a", ""], "layer 1 pops 'a', which no layer stashes"),
        (["", "", "a"], ["", "a", ""], "pops 'a' before layer 2 stashes it"),
        (["", "a", ""], ["", "a", ""], "pops 'a' before layer 1 stashes it"),
    ],
)
def test_names_that_do_not_go_together_are_refused(stash: list[str], pop: list[str], message: str):
    layers = [
        skip(nn.Linear(8, 8), stash=s or (), pop=p or ()) for s, p in zip(stash, pop, strict=True)
    ]
    with pytest.raises(ValueError, match=message):
        Pipeline(
            layers,
            schedule=schedule("gpipe", num_stages=2, num_microbatches=1),
            group=ALONE,
            loss=mse,
        )


def test_a_layer_that_returns_too_little_is_named():
    layers = [skip(nn.Linear(8, 8), stash="a"), skip(Up(), pop="a")]
    pipeline = Pipeline(
        layers, schedule=schedule("gpipe", num_stages=2, num_microbatches=1), group=ALONE, loss=mse
    )
    with pytest.raises(
        TypeError, match=r"layer 0 stashes a: it must return its result and 1 more, a tuple"
    ):
        pipeline.step(*batch(4))
