"""Elastic runs equal plain ones: losses, weights, the optimizer's states, whatever the ranks and
their layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.elastic import Bound, GradientNorm, Policy
from pyops.elastic.layout import layer_memory
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.grids import full

pytestmark = pytest.mark.cpu_only

BLOCKS, EPOCHS, BATCH = 6, 5, 8


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Run = tuple[
    list[float], dict[str, Any], dict[str, Any], list[tuple[int, int, int]], list[Any], float
]


def make_policy(name: str) -> Policy:
    return GradientNorm(1 / 3) if name == "norm" else Bound(1 / 3)


def elastic_run(rank: int, group: Any, stages: int, policy: str, options: dict[str, Any]) -> Run:
    elastic = make_elastic(
        networks.layers(BLOCKS),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=BATCH,
        seed=5,
        stages=stages,
        policy=make_policy(policy),
        max_grad_norm=0.5,
        **options,
    )
    losses, layouts, changes = [], [], []
    for _ in range(EPOCHS):
        layouts.append((elastic.frozen, elastic.layout.stages, elastic.layout.replicas))
        for share in elastic.shares():
            x, y = networks.rows(share.samples)
            losses.append(elastic.step(x, y, share=share, lr=networks.lr_of(share.step)).loss)
        if (change := elastic.decide()) is not None:
            changes.append(change)
    found = elastic.evaluate(
        networks.HELD_OUT,
        lambda share: (*networks.rows(share.samples, held_out=True), {}),
        score=networks.right,
    )
    states = elastic.states()
    weights = {
        name: t.clone() for each in states.values() for name, t in each["parameters"].items()
    }
    slots = {name: dict(slots) for each in states.values() for name, slots in each["slots"].items()}
    elastic.close()
    return losses, weights, slots, layouts, changes, found


def check_equal(runs: list[Run], policy: str, *, tolerance: float = 1e-6) -> None:
    losses, weights, slots, depths = networks.plain(
        BLOCKS, epochs=EPOCHS, batch=BATCH, policy=make_policy(policy)
    )
    seen_weights, seen_slots = set(), set()
    for theirs in runs:
        assert [frozen for frozen, _, _ in theirs[3]] == depths
        if len(theirs[0]) == len(losses):
            torch.testing.assert_close(
                torch.tensor(theirs[0]), torch.tensor(losses), rtol=tolerance, atol=tolerance
            )
        for name, value in theirs[1].items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=tolerance)
            seen_weights.add(name)
        for name, state in theirs[2].items():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(
                    torch.as_tensor(state[key]).float(),
                    torch.as_tensor(slots[name][key]).float(),
                    rtol=0,
                    atol=tolerance,
                )
            seen_slots.add(name)
    assert seen_weights == set(weights)
    assert seen_slots == set(slots)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize("policy", ["bound", "norm"])
def test_one_process_equals_a_plain_run(policy):
    run = elastic_run(0, None, 1, policy, {})
    check_equal([run], policy)
    assert len(run[4]) > 2


@pytest.mark.parametrize(
    ("ranks", "stages", "policy"),
    [(4, 4, "bound"), full(4, 2, "norm"), full(2, 2, "bound"), (3, 1, "norm")],
)
def test_ranks_that_change_their_layout_equal_a_plain_run(world, ranks, stages, policy):
    runs = world(ranks).run(elastic_run, stages, policy, {})
    check_equal(runs, policy)
    layouts = runs[0][3]
    assert layouts[0] == (0, stages, ranks // stages)
    if stages > 1:
        assert layouts[-1][1:] == (1, ranks)
    assert len({run[5] for run in runs}) == 1  # what all ranks are told of the held-out rows


def test_idle_ranks_and_kept_stages_change_no_result(world):
    for options in ({"compress": False}, {"replicate": False}):
        runs = world(4).run(elastic_run, 4, "bound", options)
        check_equal(runs, "bound")
        layouts = runs[0][3]
        # With 5 of 6 blocks frozen there are too few layers for 4 stages.
        kept = [(4, 1)] * 3 + [(2, 2)] * 2
        assert (
            [layout[1:] for layout in layouts] == kept
            if "compress" in options
            else layouts[-1][1:] == (1, 1)
        )


def stopped_short(rank: int, group: Any, stages: int) -> tuple[list[float], list[Any]]:
    """Losses, and the place in the run before and after decisions that come two steps after the
    last."""
    elastic = make_elastic(
        networks.layers(BLOCKS),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=BATCH,
        seed=5,
        stages=stages,
        policy=make_policy("bound"),
        replicate=False,
    )
    losses, places = [], []
    for _ in range(7):
        for i, share in enumerate(elastic.shares()):
            x, y = networks.rows(share.samples)
            losses.append(elastic.step(x, y, share=share, lr=networks.lr_of(share.step)).loss)
            if i == 1:
                break
        run = elastic.state_dict()["elastic"]
        places.append((run["steps"], run["since"], run["sampler"]))
        elastic.decide()
        places.append((elastic.steps, elastic.sampler.epoch, elastic.sampler.position))
    elastic.close()
    return losses, places


def test_idle_ranks_are_where_the_others_stopped(world):
    losses, places = stopped_short(0, None, 1)
    first, second = world(2).run(stopped_short, 2)
    assert len(second[0]) < len(first[0]) == len(losses)  # the second rank was idle in the end
    torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(losses), rtol=1e-6, atol=1e-6)
    assert [each[0] for each in places[::2]] == [2, 4, 6, 8, 10, 12, 14]
    assert first[1] == second[1] == places


def test_a_trial_of_micro_batches_changes_no_result(world):
    options = {"trial": True, "rows_of": with_nothing_named}
    runs = world(2).run(elastic_run, 2, "bound", options)
    check_equal(runs, "bound")
    assert any("micro-batches tried" in change.reason for change in runs[0][4])


def with_nothing_named(share: Any) -> Any:
    return (*networks.rows(share.samples), {})


class Turned(nn.Module):
    """A block that shares a table, which no state_dict has, with the others, and ties two of its
    own parameters."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.one, self.table = nn.Linear(4, 4), table
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight


def test_layers_let_go_of_their_own_memory_alone():
    table = nn.Module()
    table.register_buffer("angles", torch.arange(4.0), persistent=False)
    first, second = Turned(table), Turned(table)
    values = {name: tensor.clone() for name, tensor in layer_memory.values_of(first).items()}
    assert sorted(values) == ["one.bias", "one.weight", "two.bias", "two.weight"]
    layer_memory.drop_memory(first)
    assert not layer_memory.is_held(first)
    assert layer_memory.is_held(second)
    assert torch.equal(second.table.angles, torch.arange(4.0))
    layer_memory.take(first, values, device=torch.device("cpu"))
    assert layer_memory.is_held(first)
    assert first.two.weight is first.one.weight
    for name, tensor in layer_memory.values_of(first).items():
        assert torch.equal(tensor, values[name])
