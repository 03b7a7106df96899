"""Elastic runs that can't be, or that are at the end of what can: said on every rank alike, and no
rank waits for another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pyops.checkpoint import load, save
from pyops.elastic import Bound, CacheOptions, Callback, Elastic, GradientNorm, Policy
from pyops.elastic.policy.freeze_policies import decide_together
from pyops.elastic.runtime.run_checks import check_agreed
from tests.elastic import networks
from tests.elastic.flat import make_elastic

pytestmark = pytest.mark.cpu_only

BLOCKS, BATCH = 4, 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(layers: dict[str, nn.Module] | None = None, **options: Any) -> Elastic:
    given: dict[str, Any] = {
        "samples": networks.SAMPLES,
        "batch": BATCH,
        "seed": 5,
        "max_grad_norm": 0.5,
        **options,
    }
    return make_elastic(
        layers or networks.layers(BLOCKS), optimizer=networks.optimizer, loss=networks.loss, **given
    )


def run(
    policy: Policy, *, epochs: int = 2, **options: Any
) -> tuple[list[float], dict[str, Any], list[tuple[int, int, int]]]:
    """(losses, weights of this rank, (frozen, stages, replicas) of each epoch)."""
    elastic, losses, layouts = make(policy=policy, **options), [], []
    for _ in range(epochs):
        layouts.append((elastic.frozen, elastic.layout.stages, elastic.layout.replicas))
        for share in elastic.shares():
            losses.append(
                elastic.step(
                    *networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)
                ).loss
            )
        elastic.decide()
    weights = {
        name: t.clone()
        for each in elastic.states().values()
        for name, t in each["parameters"].items()
    }
    elastic.close()
    return losses, weights, layouts


def tied() -> dict[str, nn.Module]:
    found = networks.layers(BLOCKS)
    found["blocks.3"].up.weight = found["blocks.0"].up.weight
    return found


def fixed() -> dict[str, nn.Module]:
    found = networks.layers(BLOCKS)
    found["embedding"].bias.requires_grad_(False)
    return found


def normed(norm: nn.Module) -> dict[str, nn.Module]:
    found = networks.layers(BLOCKS)
    found["blocks.2"].norm = norm
    return found


def table_of_two() -> dict[str, nn.Module]:
    found = networks.layers(BLOCKS)
    for name in ("blocks.0", "blocks.2"):
        found[name].register_module(
            "rotary", found["blocks.0"].rotary if name != "blocks.0" else nn.Module()
        )
    found["blocks.0"].rotary.register_buffer("table", torch.ones(3))
    return found


def table_on_meta() -> dict[str, nn.Module]:
    found = networks.layers(BLOCKS)
    found["blocks.1"].register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": {**networks.layers(BLOCKS), "head": nn.Linear(5, 5, device="meta")}},
            "head.weight is on the meta device",
        ),
        (
            {"layers": table_on_meta()},
            "blocks.1.table is on the meta device, and nothing .*initialize=",
        ),
        (
            {"layers": {"embedding": nn.Linear(7, 5), "head": nn.Linear(5, 5)}},
            "layers has 2 layers; give an embedding, blocks",
        ),
        ({"layers": tied()}, r"blocks.3.up.weight is a parameter of blocks.0 too"),
        (
            {"layers": fixed()},
            "embedding.bias has requires_grad False, but active layers are trained "
            "whole; register it as a",
        ),
        (
            {"layers": normed(nn.BatchNorm1d(12))},
            "blocks.2.norm is a BatchNorm1d, .*; use a norm over a row's own values",
        ),
        (
            {"layers": normed(nn.BatchNorm2d(12, track_running_stats=False).eval())},
            "blocks.2.norm is a BatchNorm2d",
        ),
        (
            {"layers": normed(nn.InstanceNorm1d(12, track_running_stats=True))},
            "blocks.2.norm is a InstanceNorm1d",
        ),
        (
            {"layers": table_of_two()},
            r"blocks.2.rotary.table is a buffer of blocks.0 too, .*persistent=False",
        ),
        (
            {"device": "cuda"},
            "embedding.weight is on cpu, but device is cuda; move it, or give .*device=",
        ),
        ({"stages": 2}, "stages is 2, of which 1 ranks are no multiple"),
        ({"stages": 0}, "stages is 0"),
        ({"every": -1}, "every is -1; it must be 0"),
        ({"schedule": "zbv"}, "schedule is 'zbv'; it must be 1f1b or gpipe"),
        ({"batch": 0}, "batch is 0"),
        ({"terms": 0}, "terms is 0; it must be a whole number, 1 or more"),
        ({"terms": -1}, "terms is -1"),
        ({"chunk": 0}, "chunk is 0; it must be a whole number, 1 or more"),
        ({"held_out": -5}, "held_out is -5; it must be a whole number, 0 or more"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0; it must be more than 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"idle_timeout": 0.0}, "idle_timeout is 0.0; it must be a number of seconds, more than 0"),
        ({"samples": 0}, "samples is 0; it must be a whole number, 1 or more"),
        ({"batch_policy": "each"}, "batch_policy is 'each'"),
        ({"lr_rule": "square"}, "lr_rule is 'square'"),
        ({"packing": {"lambda_frozen": 2.0}}, "lambda_frozen is 2.0"),
        ({"packing": {"by": "memory"}}, "give a Profile"),
        ({"costs": [1.0] * 3, "packing": {"together": [(0, 5)]}}, "layers 0 and 5"),
    ],
)
def test_what_can_not_be(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_norms_over_a_row_may_be():
    for norm in (nn.LayerNorm(12), nn.GroupNorm(3, 12), nn.InstanceNorm1d(12)):
        make(normed(norm)).close()


def step_while_idle(rank: int, group: Any) -> str:
    elastic = make(stages=2, policy=Callback(everything), replicate=False)
    for share in elastic.shares():
        elastic.step(*networks.rows(share.samples), share=share, lr=0.01)
    elastic.decide()
    told = ""
    if not elastic.is_active:
        with pytest.raises(RuntimeError) as error:
            elastic.step(*networks.rows(share.samples), share=share, lr=0.01)
        told = str(error.value)
    elastic.close()
    return told


def test_a_rank_without_work_can_not_step(world):
    assert world(2).run(step_while_idle) == [
        "",
        "rank 1 is idle, and has no step to take; call step() for what shares() gives",
    ]


def test_bad_alpha():
    with pytest.raises(ValueError, match="alpha is 0"):
        Bound(0.0)


def test_a_policy_that_freezes_nothing():
    still, plain = (
        run(Callback(lambda norms, frozen: frozen)),
        networks.plain(
            BLOCKS, epochs=2, batch=BATCH, policy=Callback(lambda norms, frozen: frozen)
        ),
    )
    assert still[2] == [(0, 1, 1)] * 2
    torch.testing.assert_close(torch.tensor(still[0]), torch.tensor(plain[0]), rtol=1e-6, atol=1e-6)


def everything(norms: Any, frozen: int) -> int:
    return len(norms)


def all_at_once(rank: int, group: Any) -> Any:
    return run(Callback(everything), stages=2)


def test_a_policy_that_freezes_everything(world):
    losses, weights, _, depths = networks.plain(
        BLOCKS, epochs=2, batch=BATCH, policy=Callback(everything)
    )
    assert depths == [0, BLOCKS]
    for theirs in world(4).run(all_at_once):
        assert theirs[2] == [(0, 2, 2), (BLOCKS, 1, 4)], "the head learns on"
        torch.testing.assert_close(
            torch.tensor(theirs[0]), torch.tensor(losses), rtol=1e-6, atol=1e-6
        )
        for name, value in theirs[1].items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
        assert "head.weight" in theirs[1]


def few_samples(rank: int, group: Any) -> Any:
    return run(Bound(1 / 2), epochs=4, stages=2, samples=3, batch=4)


def test_fewer_samples_than_replicas(world):
    runs = world(4).run(few_samples)
    alone = run(Bound(1 / 2), epochs=4, samples=3, batch=4)
    assert runs[0][2][-1][1:] == (1, 4), "four replicas of three samples"
    for theirs in runs:
        torch.testing.assert_close(
            torch.tensor(theirs[0]), torch.tensor(alone[0]), rtol=1e-6, atol=1e-6
        )
        for name, value in theirs[1].items():
            torch.testing.assert_close(value, alone[1][name], rtol=0, atol=1e-6)


def errors_of(rank: int, group: Any) -> list[str]:
    """What each rank is told, of things that are wrong on rank 1 alone."""
    odd, found = rank == 1, []

    def caught(function: Any) -> None:
        with pytest.raises((ValueError, RuntimeError)) as error:
            function()
        found.append(str(error.value))

    def failing(norms: Any, frozen: int) -> int:
        if odd:
            raise RuntimeError("no decision")
        return frozen

    caught(lambda: make(stages=2, max_grad_norm=-1.0 if odd else None))
    caught(lambda: decide_together(Callback(failing), [1.0, 2.0], 0))
    caught(lambda: decide_together(Callback(lambda norms, frozen: 2 if odd else 1), [1.0, 2.0], 0))
    caught(lambda: decide_together(Callback(lambda norms, frozen: 3 if odd else 1), [1.0, 2.0], 0))
    caught(lambda: make(stages=2, seed=5 + odd))
    caught(lambda: make(stages=2, costs=[1.0 + 9 * odd] + [1.0] * (BLOCKS + 1)))
    caught(lambda: make(policy=Bound(0.5) if odd else None))
    caught(lambda: make(policy=Bound(0.5 if odd else 0.25)))
    caught(
        lambda: make(
            cache=CacheOptions("auto", example=lambda samples: (networks.rows(samples)[0], {}))
            if odd
            else None
        )
    )
    caught(lambda: make(chunk=4 if odd else None))
    caught(lambda: make(held_out=3 * odd))
    caught(
        lambda: make(
            stages=2,
            trial=odd,
            rows_of=(lambda share: (*networks.rows(share.samples), {})) if odd else None,
        )
    )
    order = [
        "embedding",
        "blocks.0",
        *(["blocks.2", "blocks.1"] if odd else ["blocks.1", "blocks.2"]),
        "blocks.3",
        "head",
    ]
    caught(lambda: make({name: networks.layers(BLOCKS)[name] for name in order}, stages=2))
    caught(lambda: make(batch=9, batch_policy="replica"))
    layers = networks.layers(3 if odd else 2)
    caught(lambda: check_agreed({"batch": 8 + odd, "seed": 1}, layers=networks.layers(2)))
    caught(lambda: check_agreed({"batch": 8}, layers=layers))
    caught(lambda: check_agreed({"batch": 8}, layers={"head": nn.Linear(3 + odd, 2)}))
    return found


def test_ranks_that_differ_are_told_so_on_all_of_them(world):
    first, second = world(2).run(errors_of)
    assert first == second
    beginnings = (
        "max_grad_norm is -1.0",
        "no decision",
        "rank 0 would freeze 1 layers, but rank 1 2",
        "the callback would freeze 3 layers",
        "seed is 5 on rank 0, but 6 on rank 1; give all ranks the same",
        "packing is Packing(frozen=0, stages=2, ",
        "policy is 'NoneType' on rank 0, but 'Bound' on rank 1",
        "the policy is {'alpha': Fraction(1, 4)} on rank 0, but {'alpha': Fraction(1, "
        "2)} on rank 1; give all ranks the same",
        "cache is {'mode': 'off', 'disk': False} on rank 0, but {'mode': 'auto', 'disk': "
        "False} on rank 1",
        "chunk is None on rank 0, but 4 on rank 1",
        "held_out is 0 on rank 0, but 3 on rank 1",
        "trial is False on rank 0, but True on rank 1",
        "the order of layers is ['embedding', 'blocks.0', 'blocks.1', 'blocks.2', "
        "'blocks.3', 'head'] on rank 0, but ['emb",
        "batch is 9, which 2 replicas can't share evenly, but batch_policy is "
        "'replica', which gives each as many; take a multiple of 2",
        "batch is 8 on rank 0, but 9 on rank 1; give all ranks the same",
        "layer blocks.2 is not there on rank 0, but up.weight [24, 12] float32, ",
        "layer head is weight [2, 3] float32, bias [2] float32 on rank 0, but weight [2, "
        "4] float32, ",
    )
    for text, beginning in zip(first, beginnings, strict=True):
        assert text.startswith(beginning)


def deciding_otherwise(rank: int, group: Any) -> tuple[str, tuple[int, int, int], bool]:
    """What a rank is told in a run whose policy says something else on each; the layout then;
    whether the next step counts."""
    elastic = make(stages=2, policy=Callback(lambda norms, frozen: 1 + rank))
    for share in elastic.shares():
        elastic.step(*networks.rows(share.samples), share=share, lr=0.01)
    with pytest.raises(ValueError) as error:
        elastic.decide()
    share = next(iter(elastic.shares()))
    found = elastic.step(*networks.rows(share.samples), share=share, lr=0.01)
    layout = (elastic.frozen, elastic.layout.stages, elastic.layout.replicas)
    elastic.close()
    return str(error.value), layout, math.isfinite(found.loss)


def test_a_policy_that_decides_otherwise_on_one_rank_changes_nothing(world):
    for told, layout, goes_on in world(2).run(deciding_otherwise):
        assert told.startswith("rank 0 would freeze 1 layers, but rank 1 2")
        assert layout == (0, 2, 1)
        assert goes_on


def another(what: str) -> dict[str, Any]:
    """The state of a run that differs in one thing."""
    layers, policy, options = networks.layers(5 if what == "blocks" else BLOCKS), Bound(0.4), {}
    policy.decide([1.0] * BLOCKS, 0)
    if what == "shapes":
        layers["head"] = nn.Linear(networks.WIDTH, 1)
    elif what == "more":
        layers["blocks.1"].register_buffer("table", torch.zeros(3))
    elif what == "fewer":
        layers["blocks.2"].down = nn.Linear(2 * networks.WIDTH, networks.WIDTH, bias=False)
    elif what == "data":
        options = {"samples": networks.SAMPLES + 1}
    elastic = make(
        layers, policy={"policy": GradientNorm(0.4), "no policy": None}.get(what, policy), **options
    )
    state = elastic.state_dict()
    elastic.close()
    return {"model": state["model"]} if what == "kind" else state


MESSAGES = {
    "shapes": "head.weight is [1, 12] torch.float32 in the state, but [5, 12] torch.float32 here",
    "blocks": "the state is of a model with 5 blocks, but there are 4",
    "more": "the state has blocks.1.table, which this model has not",
    "fewer": "the state has no blocks.2.down.bias",
    "data": "the state is of a sampler with samples=28",
    "policy": "the state is of the policy 'GradientNorm'",
    "no policy": "one of the state and this run has a policy",
    "kind": "the state has no 'elastic': it is of a run that was not elastic",
}


def refused(rank: int, group: Any, folder: Path) -> tuple[list[str], bool, list[float]]:
    elastic = make(policy=Bound(0.4), stages=2)
    before, told, losses = elastic.state_dict()["elastic"], [], []
    for what in MESSAGES:
        with pytest.raises(ValueError) as caught:
            elastic.load_state_dict(load(folder / what, lazy=True)[0])
        told.append(str(caught.value))
    unchanged = elastic.state_dict()["elastic"] == before
    for _ in range(2):
        for share in elastic.shares():
            losses.append(
                elastic.step(
                    *networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)
                ).loss
            )
        elastic.decide()
    elastic.close()
    return told, unchanged, losses


def test_the_state_of_another_run_changes_nothing(world, tmp_path):
    for what in MESSAGES:
        save(tmp_path / what, another(what))
    losses, *_ = networks.plain(BLOCKS, epochs=2, batch=BATCH, policy=Bound(0.4))
    for told, unchanged, theirs in world(2).run(refused, tmp_path):
        assert [
            text[: len(expected)] for text, expected in zip(told, MESSAGES.values(), strict=True)
        ] == [*MESSAGES.values()]
        assert unchanged
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(losses), rtol=1e-6, atol=1e-6)


class Overflowing(nn.Linear):
    """A head whose weight's gradient, and no other, is infinite while `now`."""

    now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.now and weight.requires_grad:
            weight = weight.clone()
            weight.register_hook(lambda gradient: gradient * math.inf)
        return nn.functional.linear(x, weight, self.bias)


def overflowing(
    rank: int, group: Any, stages: int
) -> tuple[list[tuple[int, tuple[float, ...]]], list[int]]:
    """What the policy was asked, and after how many steps; steps that were not taken."""
    layers, asked, skipped = networks.layers(BLOCKS), [], []
    head = Overflowing(networks.WIDTH, networks.LABELS)
    head.load_state_dict(layers["head"].state_dict())

    def keep(norms: tuple[float, ...], frozen: int) -> int:
        asked.append((elastic.steps, norms))
        return 3 if elastic.steps >= 4 else frozen

    elastic = make(
        {**layers, "head": head}, policy=Callback(keep), stages=stages, every=2, replicate=False
    )
    for _ in range(4):
        for share in elastic.shares():
            head.now = share.step in (1, 4, 5)
            found = elastic.step(
                *networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)
            )
            if not math.isfinite(found.grad_norm):
                skipped.append(share.step)
        elastic.decide()
    elastic.close()
    return asked, skipped


def test_steps_that_are_not_taken_count_in_no_stage_and_end_no_run(world):
    alone, skipped = overflowing(0, None, 1)
    assert [steps for steps, _ in alone] == [2, 4, 8]  # not after 6, as both steps were not taken
    first, second = world(2).run(overflowing, 2)
    assert first[1] == skipped == [1, 4, 5]
    assert second[1] == [1]  # it was idle then
    for theirs, _ in (first, second):
        assert [steps for steps, _ in theirs] == [2, 4, 8]
        for (_, norms), (_, expected) in zip(theirs, alone, strict=True):
            assert norms == pytest.approx(expected, rel=1e-5)
