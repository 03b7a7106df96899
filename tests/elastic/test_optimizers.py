"""Every local optimizer's states go along: a pipeline that becomes replicas has the losses of a plain run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pyops.config import COMMUNICATING, OPTIMIZERS, Config, OptimizerConfig
from pyops.elastic import Bound, Elastic
from pyops.train.recipe import make_named_optimizer
from tests.elastic import networks

pytestmark = pytest.mark.cpu_only

LOCAL = [name for name in OPTIMIZERS if name not in COMMUNICATING]
BLOCKS, EPOCHS = 4, 3


def make(name: str) -> Any:
    # A large eps: see networks.optimizer.
    return partial(make_named_optimizer, Config(optimizer=OptimizerConfig(name=name, eps=1e-3)))


def losses_of(rank: int, group: Any, names: list[str]) -> dict[str, tuple[list[float], list[tuple[int, int]]]]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        elastic = Elastic(
            networks.layers(BLOCKS), optimizer=make(name), loss=networks.loss, samples=networks.SAMPLES, batch=8, seed=5,
            stages=2, policy=Bound(1 / 2), max_grad_norm=0.5,
        )  # fmt: skip
        losses, layouts = [], []
        for _ in range(EPOCHS):
            layouts.append((elastic.layout.stages, elastic.layout.replicas))
            for share in elastic.shares():
                losses.append(elastic.step(*networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)).loss)
            elastic.decide()
        elastic.close()
        found[name] = losses, layouts
    return found


def test_every_local_optimizer(world):
    assert len(LOCAL) == 8
    torch.set_num_threads(1)
    runs = world(2).run(losses_of, LOCAL)
    seen = set()
    for name in LOCAL:
        whole, *_ = networks.plain(BLOCKS, epochs=EPOCHS, batch=8, policy=Bound(1 / 2), make=make(name))
        seen.add(round(whole[-1], 5))
        for found in runs:
            losses, layouts = found[name]
            assert layouts == [(2, 1), (2, 1), (1, 2)]
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(whole), rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert len(seen) == len(LOCAL), "each has its own way"


class Told(torch.optim.SGD):
    """Notes the learning rate of each parameter in each step."""

    seen: list[dict[int, float]]

    def step(self, closure: Any = None) -> None:
        self.seen.append({id(p): group["lr"] for group in self.param_groups for p in group["params"]})
        super().step(closure)


def rates_of(rank: int, group: Any) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """({parameter: learning rate} of each step, layout of each epoch) where the head's is a tenth of the others'."""
    torch.set_num_threads(1)
    made: list[tuple[list[tuple[str, torch.nn.Parameter]], Told]] = []

    def make(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        head, others = ([p for name, p in named if name.startswith("head") == wanted] for wanted in (True, False))
        groups = [{"params": some, **own} for some, own in ((head, {"lr": 0.05}), (others, {})) if some]
        optimizer = Told(groups, lr=0.5)
        optimizer.seen = []
        made.append((named, optimizer))
        return optimizer

    elastic = Elastic(
        networks.layers(BLOCKS), optimizer=make, loss=networks.loss, samples=networks.SAMPLES, batch=8, seed=5, stages=2,
        policy=Bound(1 / 2),
    )  # fmt: skip
    layouts = []
    for _ in range(EPOCHS):
        layouts.append((elastic.layout.stages, elastic.layout.replicas))
        for share in elastic.shares():
            elastic.step(*networks.rows(share.samples), share=share, lr=0.25)
        elastic.decide()
    elastic.close()
    found = [{name: step[id(p)] for name, p in named} for named, optimizer in made for step in optimizer.seen]
    return found, layouts


def test_groups_keep_the_ratio_of_their_learning_rates(world):
    for steps, layouts in world(2).run(rates_of):
        assert layouts[0] != layouts[-1]
        for rates in steps:
            assert rates == pytest.approx({name: 0.025 if name.startswith("head") else 0.25 for name in rates})
        assert "head.weight" in steps[-1]


def test_groups_have_no_ratio_to_a_rate_of_nothing():
    def make(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p for _, p in named], "lr": 0.1}], lr=0.0)

    with pytest.raises(ValueError, match=r"the optimizer's default lr is 0.0, but its groups have \[0.1\]; give it one"):
        Elastic(networks.layers(BLOCKS), optimizer=make, loss=networks.loss, samples=networks.SAMPLES, batch=8, seed=5)
