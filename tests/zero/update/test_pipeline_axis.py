"""ZeroOptimizer over the stages of a pipeline, put together by hand: as one process with all the
layers and the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.mesh import Axes, Mesh
from pyops.optim import AdamW
from pyops.pipeline import Action, Pipeline, PipelineConfig, schedule
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.pipeline.reference import batch, mlp

pytestmark = pytest.mark.cpu_only

STEPS, LIMIT = 3, 0.02


class Holder(nn.Module):
    """A weight that another stage's layer shares, under its name there."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def tied() -> list[nn.Module]:
    layers = mlp(4)
    layers[3][0].weight = layers[0][0].weight  # type: ignore[index]
    return layers


def squared(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def in_one_process() -> tuple[dict[str, Tensor], list[float]]:
    model, (x, target), norms = nn.Sequential(*tied()), batch(8), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (squared(model(x), target) / x.numel()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    return dict(model.named_parameters()), norms


def by_hand(rank: int, group: Any, stage: int, bucket_bytes: int) -> None:
    mesh, layers = Mesh(Axes(pp=2, dp=2)), tied()
    plan = schedule("zb1p", num_stages=2, num_microbatches=2)
    own = {str(i): layers[i] for i in ((0, 1), (2, 3))[mesh.rank("pp")]}
    held = {"0": nn.ModuleDict({"0": Holder(layers[0][0].weight)})} if mesh.rank("pp") else {}
    part = nn.ModuleDict({**held, **own})
    optimizer = ZeroOptimizer(
        part,
        AdamW,
        ZeroConfig(stage=stage, max_grad_norm=LIMIT, reduction="sum", bucket_bytes=bucket_bytes),
        group=mesh.group("dp"),
        pp_group=mesh.group("pp"),
        lr=0.1,
    )
    pipeline = Pipeline(
        layers,
        schedule=plan,
        mesh=mesh,
        loss=squared,
        config=PipelineConfig(reduction="sum", boundaries=[0, 2, 4], tied=None),
    )
    ends = {
        plan.ranks[mesh.rank("pp")][plan.last_gradients[s]]: s
        for s in plan.stages_of(mesh.rank("pp"))
    }

    def reduce(action: Action) -> None:
        if action in ends:
            optimizer.reduce(
                p for layer in pipeline.stages[ends[action]].layers for p in layer.parameters()
            )

    pipeline.on_action(reduce)
    x, target = (t.tensor_split(2)[mesh.rank("dp")] for t in batch(8))
    expected, norms = in_one_process()
    for norm in norms:
        with optimizer.no_sync():
            pipeline.step(x, target, scale=1 / (2 * x.numel()))
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-5)
        assert norm > LIMIT
    with optimizer.whole_parameters():
        for name, p in part.named_parameters():
            torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-6)
        same = [torch.empty_like(layers[0][0].weight) for _ in range(4)]
        torch.distributed.all_gather(same, layers[0][0].weight.detach())
    assert all(torch.equal(each, same[0]) for each in same), "copies of one parameter stay equal"


@pytest.mark.parametrize(
    ("stage", "bucket_bytes"), [(0, 300), (1, 300), (1, 25 << 20), (2, 300), (3, 300)]
)
def test_stages_and_copies_of_a_model(world, stage, bucket_bytes):
    world(4).run(by_hand, stage, bucket_bytes)


def refused(rank: int, group: Any) -> list[str]:
    found = []
    mesh = Mesh(Axes(pp=2))
    try:
        ZeroOptimizer(mlp(1)[0], AdamW, ZeroConfig(stage=1), group=None, pp_group=mesh.group("pp"))
    except ValueError as error:
        found.append(str(error))
    try:  # of one rank alone
        ZeroOptimizer(
            nn.Linear(2, 2),
            AdamW,
            ZeroConfig(stage=1 + 3 * rank),
            group=mesh.group("dp"),
            pp_group=mesh.group("pp"),
        )
    except ValueError as error:
        found.append(str(error))
    return found


def test_what_can_not_be_is_refused_on_all_ranks(world):
    for found in world(2).run(refused):
        assert "they must have only rank" in found[0]
        assert "stage is 4" in found[1]
