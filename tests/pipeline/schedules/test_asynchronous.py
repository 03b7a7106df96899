"""Asynchronous runs of the executor against the papers' update rules, written down without schedule
or pipeline."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pyops.mesh import ALONE
from pyops.pipeline import (
    Action,
    Pipeline,
    PipelineConfig,
    PipeMareOptions,
    schedule,
)
from tests.grids import cut, full
from tests.pipeline import emulation
from tests.pipeline.asynchronous import (
    OPTIMIZERS,
    RULES,
    made,
    microbatch_rows,
    mse,
    same,
    weights_of,
)
from tests.pipeline.reference import batch, mlp

pytestmark = pytest.mark.cpu_only


ENDS = ((1, 7), (4, 19), (4, 2))  # (stages, micro-batches): one, many, and a pipe that never fills
BETWEEN = ((2, 11), (3, 15))
# An optimizer's state has versions of its own under the first rule; the others share its steps.
STASHED = [
    *((rule, "sgd", ENDS) for rule in RULES),
    *((rule, "momentum", ((3, 15),)) for rule in RULES),
    *(("stash", optimizer, ((3, 15),)) for optimizer in OPTIMIZERS if optimizer != "sgd"),
]


@pytest.mark.parametrize(
    ("rule", "optimizer", "sizes"),
    cut(
        [
            (rule, optimizer, sizes)
            for rule in RULES
            for optimizer in OPTIMIZERS
            for sizes in ((ENDS, BETWEEN) if optimizer == "sgd" else (((3, 15),),))
        ],
        keep=STASHED,
    ),
)
def test_stashed_versions_follow_their_papers_rule(
    rule: str, optimizer: str, sizes: tuple[tuple[int, int], ...]
):
    name, options, make_rule = RULES[rule]
    for k, m in sizes:
        x, target, xs, targets = microbatch_rows(
            m, 40
        )  # uneven micro-batches, and an uneven number for the last step
        plan = schedule(name, num_stages=k, num_microbatches=len(xs), **options)
        ours, theirs = mlp(), mlp()
        pipeline = Pipeline(
            ours, schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS[optimizer]
        )
        pipeline.step(x, target)
        emulation.emulate(
            theirs,
            pipeline.boundaries,
            make_rule(k),
            OPTIMIZERS[optimizer],
            xs,
            targets,
            accumulate=plan.options["accumulate"],
            loss=mse,
        )
        assert same(weights_of(ours), weights_of(theirs)), (k, m)
        assert all(p.grad is None for p in pipeline.parameters())
        assert all(stage.num_in_flight == 0 for stage in pipeline.stages.values())


CORRECTED = math.exp(-2)


@pytest.mark.parametrize(
    ("optimizer", "warmup", "decay"),
    [
        *(("sgd", "a", None), ("adam", "b", None), full("momentum", "b", None)),
        *(("momentum", "b", CORRECTED), ("fused", "a", CORRECTED)),
        *(full("sgd", "a", CORRECTED), full("adam", "b", CORRECTED), full("fused", "a", None)),
    ],
)
def test_pipemare_follows_its_papers_rule(optimizer: str, warmup: str, decay: float | None):
    for k, accumulate, anneal in ((1, 1, 0), (4, 1, 9), (2, 2, 0)):
        x, target, xs, targets = microbatch_rows(16, 32)
        plan = schedule(
            "pipemare", num_stages=k, num_microbatches=16, warmup=warmup, accumulate=accumulate
        )

        def in_flight(s: int, k: int = k) -> int:
            return k - s if warmup == "a" else 2 * (k - s) - 1

        ours, theirs = mlp(), mlp()
        pipeline = Pipeline(
            ours,
            schedule=plan,
            group=ALONE,
            loss=mse,
            optimizer=OPTIMIZERS[optimizer],
            pipemare=PipeMareOptions(decay=decay, anneal=anneal),
        )
        pipeline.step(x, target)
        emulation.pipemare(
            theirs,
            pipeline.boundaries,
            OPTIMIZERS[optimizer],
            xs,
            targets,
            loss=mse,
            in_flight=in_flight,
            accumulate=accumulate,
            decay=decay,
            anneal=anneal,
        )
        assert same(weights_of(ours), weights_of(theirs)), (k, accumulate)


class Odd(nn.Module):
    """Weights that autograd keeps as they are, as views, and by way of an index; a layer that
    computes itself again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.rand(8) + 0.5), nn.Embedding(4, 8)
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * self.scale) + self.table(torch.arange(len(x)) % 4)
        return checkpoint(self._compute, y, use_reentrant=False)

    def _compute(self, y: Tensor) -> Tensor:
        return torch.tanh(self.linear(y) * self.scale[:1])


def odd(layers: int = 3) -> list[nn.Module]:
    torch.manual_seed(4)
    return [Odd() for _ in range(layers)]


@pytest.mark.parametrize(
    ("rule", "recompute"),
    [("stash", "never"), ("stash", "except_last"), ("vertical", "always"), ("two", "except_last")],
)
def test_any_layer_meets_the_right_version(rule: str, recompute: str):
    name, options, make_rule = RULES[rule]
    x, target, xs, targets = microbatch_rows(8, 16)
    plan = made(name, 3, 8, **options).with_recompute(recompute)
    ours, theirs = odd(), odd()
    pipeline = Pipeline(
        ours, schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS["momentum"]
    )
    pipeline.step(x, target)
    emulation.emulate(
        theirs,
        pipeline.boundaries,
        make_rule(3),
        OPTIMIZERS["momentum"],
        xs,
        targets,
        accumulate=plan.options["accumulate"],
        loss=mse,
    )
    assert all(torch.equal(a, b) for a, b in zip(weights_of(ours), weights_of(theirs), strict=True))
    assert all(
        not torch.equal(a, b) for a, b in zip(weights_of(ours), weights_of(odd()), strict=True)
    )


def test_autocast_takes_no_copies_of_old_weights():
    x, target, xs, targets = microbatch_rows(8, 32)
    for name, options, make_rule in RULES.values():
        ours, theirs = mlp(), mlp()
        plan = made(name, 3, 8, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline = Pipeline(
                ours, schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS["sgd"]
            )
            pipeline.step(x, target)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            emulation.emulate(
                theirs,
                pipeline.boundaries,
                make_rule(3),
                OPTIMIZERS["sgd"],
                xs,
                targets,
                accumulate=plan.options["accumulate"],
                loss=mse,
            )
        assert same(weights_of(ours), weights_of(theirs))
    again, theirs = mlp(), mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # stepped in place
        Pipeline(
            again,
            schedule=made("pipemare", 1, 8),
            group=ALONE,
            loss=mse,
            optimizer=OPTIMIZERS["sgd"],
        ).step(x, target)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        emulation.emulate(theirs, [0, 8], lambda t, s: t, OPTIMIZERS["sgd"], xs, targets, loss=mse)
    assert same(weights_of(again), weights_of(theirs))


@pytest.mark.parametrize("rule", RULES)
def test_a_version_is_kept_as_long_as_it_is_needed_and_no_longer(rule: str):
    name, options, _ = RULES[rule]
    k = 4
    x, target, _, _ = microbatch_rows(6 * k, 6 * k)
    plan = made(name, k, 6 * k, **options)
    pipeline = Pipeline(mlp(), schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS["sgd"])
    most = [0] * k

    def look(action: Action) -> None:
        for stage, stepping in pipeline.async_steps.of_stage.items():
            most[stage] = max(most[stage], stepping.versions.num_kept)

    pipeline.on_action(look)
    for _ in range(2):
        pipeline.step(x, target)
        assert most == [plan.versions_kept(stage) for stage in range(k)]
        assert [
            stepping.versions.num_kept for stepping in pipeline.async_steps.of_stage.values()
        ] == [1] * k
    if rule == "stash":
        assert most == [k - s for s in range(k)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_of_a_version_is_let_go(optimizer: str):
    """Neither graphs nor the optimizer hold on to it."""
    k = 4
    plan = made("pipedream", k, 20)
    pipeline = Pipeline(
        mlp(4), schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS[optimizer]
    )
    seen: list[list[StorageWeakRef]] = [[] for _ in range(k)]
    alive: list[set[int]] = [set() for _ in range(k)]

    def look(action: Action) -> None:
        stage = action.stage
        seen[stage].append(
            StorageWeakRef(pipeline.stages[stage].layers[0][0].weight.untyped_storage())
        )
        alive[stage].add(len({each.cdata for each in seen[stage] if not each.expired()}))

    pipeline.on_action(look)
    pipeline.step(*batch(20))
    assert [max(found) for found in alive] == [plan.versions_kept(stage) for stage in range(k)]


@pytest.mark.parametrize(
    ("name", "k"),
    cut(
        itertools.product(["pipedream", "pipemare"], [2, 3, 4]),
        keep=[("pipedream", 4), ("pipemare", 2)],
    ),
)  # the delays of a schedule's stages are held above, for each number of them
def test_delayed_descent_is_stable_up_to_its_limit(name: str, k: int):
    """On lambda w^2 / 2 with lr 1 and weights tau steps old: up to lambda = 2 sin(pi / (4 tau +
    2)). One run tries many."""

    class Square(nn.Module):
        def __init__(self, curvature: Tensor) -> None:
            super().__init__()
            self.w, self.curvature = nn.Parameter(torch.ones_like(curvature)), curvature

        def forward(self, x: Tensor) -> Tensor:  # [rows, n]
            return x * self.curvature.sqrt() * self.w

    plan = made(name, k, 800)
    tau = int(plan.delay(0))
    assert tau == k - 1
    limit = 2 * math.sin(math.pi / (4 * tau + 2))
    tried = limit * torch.linspace(0.95, 1.05, 101, dtype=torch.float64)
    square = Square(tried)
    layers = [square, *(nn.Identity() for _ in range(k - 1))]
    pipeline = Pipeline(
        layers,
        schedule=plan,
        group=ALONE,
        loss=lambda y, _: y.square().sum() / 2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        config=PipelineConfig(boundaries=list(range(k + 1))),
    )
    x = torch.ones(800, 1, dtype=torch.float64)
    sizes = [torch.zeros_like(tried) for _ in range(2)]
    period = 2 * (2 * tau + 1)  # in which w swings once at the limit

    def look(action: Action) -> None:
        when = (100 <= action.number < 100 + 10 * period, action.number >= 800 - 10 * period)
        if action.stage == 0 and action.kind == "U" and any(when):
            sizes[when[1]].add_(square.w.detach().square())

    pipeline.on_action(look)
    pipeline.step(x, x)
    growing = sizes[1] > sizes[0]
    assert abs(float(tried[growing].min()) / limit - 1) < 0.002
    assert abs(float(tried[~growing].max()) / limit - 1) < 0.002


def test_a_correction_finds_the_weights_of_forward_where_they_drift_evenly():
    """Gradients that are always 1: w_t = w_0 - lr t. What backward meets is w_{t - tau}, once the
    average has settled."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            self.seen: list[tuple[Tensor, Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            forward = self.w.detach().clone()
            y = x + self.w
            y.register_hook(lambda _: self.seen.append((forward, self.w.detach().clone())))
            return y

    for decay, close in ((math.exp(-2), True), (None, False)):
        constant = Constant()
        pipeline = Pipeline(
            [constant, nn.Identity(), nn.Identity()],
            schedule=made("pipemare", 3, 60, warmup="b"),
            group=ALONE,
            loss=lambda y, _: y.sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            pipemare=PipeMareOptions(decay=decay),
            config=PipelineConfig(boundaries=[0, 1, 2, 3]),
        )
        x = torch.ones(60, 1, dtype=torch.float64)
        pipeline.step(x, x)
        assert len(constant.seen) == 60
        for forward, backward in constant.seen[40:]:
            assert (forward != 0).all()
            assert torch.allclose(forward, backward, rtol=1e-7, atol=0) == close
        assert torch.equal(constant.w.detach(), torch.full((3,), -0.5 * 60, dtype=torch.float64))


def test_the_learning_rate_anneals_to_its_base_value():
    k, x, target = 4, *batch(12)
    plan = made("pipemare", k, 12, warmup="b")
    remedies = PipeMareOptions(anneal=10, synchronous=1)
    pipeline = Pipeline(
        mlp(), schedule=plan, group=ALONE, loss=mse, optimizer=OPTIMIZERS["sgd"], pipemare=remedies
    )
    first = pipeline.async_steps.of_stage[0]
    rates: list[float] = []
    pipeline.on_action(
        lambda action: (
            rates.append(first.lr_factor) if action.stage == 0 and action.kind == "U" else None
        )
    )
    pipeline.step(x, target)  # synchronous: nothing is stale
    assert first.steps == 0
    assert rates == [1.0] * 12
    rates.clear()
    assert first.lr_factor == 1 / 6
    pipeline.step(x, target)
    assert rates == [6.0 ** -(1 - min(step / 10, 1.0)) for step in range(1, 13)]
    assert pipeline.async_steps.of_stage[3].lr_factor == 1
    assert [group["lr"] for group in pipeline.async_steps.optimizers[0].param_groups] == [0.3]
