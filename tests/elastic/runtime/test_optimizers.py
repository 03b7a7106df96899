"""Every local optimizer's states go along: a pipeline that becomes replicas has the losses of a
plain run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pyops.config import COMMUNICATING, OPTIMIZERS, Config, ElasticConfig, OptimizerConfig
from pyops.elastic import Bound
from pyops.models import GPTConfig
from pyops.train.setup.recipe import make_named_optimizer
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.grids import full

pytestmark = pytest.mark.cpu_only

LOCAL = [name for name in OPTIMIZERS if name not in COMMUNICATING]
BLOCKS, EPOCHS = 4, 3


def make(name: str) -> Any:
    # A large eps: see networks.optimizer.
    return partial(make_named_optimizer, Config(optimizer=OptimizerConfig(name=name, eps=1e-3)))


def losses_of(
    rank: int, group: Any, names: list[str]
) -> dict[str, tuple[list[float], list[tuple[int, int]]]]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        elastic = make_elastic(
            networks.layers(BLOCKS),
            optimizer=make(name),
            loss=networks.loss,
            samples=networks.SAMPLES,
            batch=8,
            seed=5,
            stages=2,
            policy=Bound(1 / 2),
            max_grad_norm=0.5,
        )
        losses, layouts = [], []
        for _ in range(EPOCHS):
            layouts.append((elastic.layout.stages, elastic.layout.replicas))
            for share in elastic.shares():
                losses.append(
                    elastic.step(
                        *networks.rows(share.samples), share=share, lr=networks.lr_of(share.step)
                    ).loss
                )
            elastic.decide()
        elastic.close()
        found[name] = losses, layouts
    return found


# States of elements, of whole tensors, and of rows and columns.
IN_SUITE = ["adamw", "lamb", "adafactor"]


@pytest.mark.parametrize("names", [IN_SUITE, full(LOCAL)], ids=["three", "all"])
def test_every_local_optimizer(world, names):
    assert len(LOCAL) == 8
    torch.set_num_threads(1)
    runs = world(2).run(losses_of, names)
    seen = set()
    for name in names:
        whole, *_ = networks.plain(
            BLOCKS, epochs=EPOCHS, batch=8, policy=Bound(1 / 2), make=make(name)
        )
        seen.add(round(whole[-1], 5))
        for found in runs:
            losses, layouts = found[name]
            assert layouts == [(2, 1), (2, 1), (1, 2)]
            torch.testing.assert_close(
                torch.tensor(losses),
                torch.tensor(whole),
                rtol=2e-6,
                atol=2e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    assert len(seen) == len(names), "each has its own way"


Named = list[tuple[str, torch.nn.Parameter]]


def with_a_slow_head(named: Named) -> torch.optim.Optimizer:
    head, others = (
        [p for name, p in named if name.startswith("head") == wanted] for wanted in (True, False)
    )
    groups = [{"params": some, **own} for some, own in ((head, {"lr": 0.05}), (others, {})) if some]
    return torch.optim.SGD(groups, lr=0.5)


def with_layer_decay(named: Named) -> torch.optim.Optimizer:
    options = OptimizerConfig(name="sgd", lr=0.5, layer_decay=0.5)
    model = GPTConfig(num_layers=BLOCKS, tied_head=False)
    return make_named_optimizer(
        Config(optimizer=options, model=model, elastic=ElasticConfig(freeze="bound")), named
    )


def rates_of(
    rank: int, group: Any, make: Any
) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """({parameter: learning rate} of each step, layout of each epoch)."""
    torch.set_num_threads(1)
    found: list[dict[str, float]] = []

    def noted(named: Named) -> torch.optim.Optimizer:
        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            rates = {
                id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]
            }
            found.append({name: rates[id(p)] for name, p in named})

        optimizer = make(named)
        optimizer.register_step_pre_hook(note)
        return optimizer

    elastic = make_elastic(
        networks.layers(BLOCKS),
        optimizer=noted,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        stages=2,
        policy=Bound(1 / 2),
    )
    layouts = []
    for _ in range(EPOCHS):
        layouts.append((elastic.layout.stages, elastic.layout.replicas))
        for share in elastic.shares():
            elastic.step(*networks.rows(share.samples), share=share, lr=0.25)
        elastic.decide()
    elastic.close()
    return found, layouts


def test_groups_keep_the_ratio_of_their_learning_rates(world):
    for steps, layouts in world(2).run(rates_of, with_a_slow_head):
        assert layouts[0] != layouts[-1]
        for rates in steps:
            assert rates == pytest.approx(
                {name: 0.025 if name.startswith("head") else 0.25 for name in rates}
            )
        assert "head.weight" in steps[-1]


def test_each_layer_learns_at_a_part_of_the_rate_of_the_layer_behind_it(world):
    layers = {
        "embedding": 2.0**-5,
        **{f"blocks.{i}": 2.0 ** (i - 4) for i in range(BLOCKS)},
        "head": 1.0,
    }
    seen = set()
    for steps, layouts in world(2).run(rates_of, with_layer_decay):
        assert layouts[0] != layouts[-1]
        for rates in steps:
            assert rates == {
                name: 0.25 * next(r for layer, r in layers.items() if name.startswith(layer))
                for name in rates
            }
            seen |= set(rates.values())
        assert "head.weight" in steps[-1]
    assert seen == {0.25 * rate for rate in layers.values()}


def test_groups_have_no_ratio_to_a_rate_of_nothing():
    def make(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p for _, p in named], "lr": 0.1}], lr=0.0)

    with pytest.raises(
        ValueError,
        match=r"the optimizer's default lr is 0.0, but its groups have \[0.1\]; give it one",
    ):
        make_elastic(
            networks.layers(BLOCKS),
            optimizer=make,
            loss=networks.loss,
            samples=networks.SAMPLES,
            batch=8,
            seed=5,
        )
