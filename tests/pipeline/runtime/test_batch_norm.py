"""Running statistics of batch norm after a pipelined step: those of one layer over the whole batch,
once a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from pyops.pipeline.runtime.batch_norm import Tally

pytestmark = pytest.mark.cpu_only

RECOMPUTE = ("never", "always", "except_last")


def mse(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (y - wanted).square().mean()


def layers(momentum: float | None = 0.1) -> list[nn.Module]:
    """Each batch norm but the last has only layers before it that treat rows one by one, so
    micro-batches do not show."""
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum)),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()),
    ]


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 0.1 * torch.randn(rows, 6, generator=generator), torch.randn(
        rows, 6, generator=generator
    )


def first_norm(model: list[nn.Module]) -> Any:
    return model[1][1]


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_running_statistics_are_the_whole_batchs(recompute: str, momentum: float | None):
    for rows, m in ((8, 1), (8, 4), (9, 4), (7, 3)):
        ours, plain = layers(momentum), nn.Sequential(*layers(momentum)).double()
        plan = schedule("1f1b", num_stages=2, num_microbatches=m).with_recompute(recompute)
        pipeline = Pipeline(ours, schedule=plan, group=ALONE, loss=mse)
        for step in range(3):
            x, target = batch(rows, step)
            pipeline.step(x, target)
            plain(x.double())
        found, wanted = first_norm(ours), first_norm(list(plain))
        assert int(found.num_batches_tracked) == int(wanted.num_batches_tracked) == 3
        torch.testing.assert_close(
            found.running_mean.double(), wanted.running_mean, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            found.running_var.double(), wanted.running_var, rtol=1e-5, atol=1e-9
        )
        assert not torch.equal(found.running_var, torch.ones(6))
        last = ours[3][1]
        assert int(last.num_batches_tracked) == 3


def test_fewer_rows_than_two_micro_batches_each():
    """5 rows in 4 micro-batches: three of one row, which a norm of [rows, channels, length]
    takes."""
    torch.manual_seed(0)
    ours: list[nn.Module] = [
        nn.Unflatten(1, (2, 3)),
        nn.BatchNorm1d(2),
        nn.Flatten(),
        nn.Linear(6, 6),
    ]
    plain = copy.deepcopy(ours[1]).double()
    pipeline = Pipeline(
        ours,
        schedule=schedule("gpipe", num_stages=2, num_microbatches=4),
        group=ALONE,
        loss=mse,
        config=PipelineConfig(boundaries=[0, 2, 4]),
    )
    for step in range(4):
        x, target = batch(5, step)
        pipeline.step(x, target)
        plain(x.double().unflatten(1, (2, 3)))
    assert int(ours[1].num_batches_tracked) == 4
    torch.testing.assert_close(
        ours[1].running_var.double(), plain.running_var, rtol=1e-5, atol=1e-9
    )
    torch.testing.assert_close(
        ours[1].running_mean.double(), plain.running_mean, rtol=1e-5, atol=1e-6
    )


def test_gradients_are_those_of_torchs_layer_on_micro_batches():
    x, target = batch(8, 0)
    ours, plain = layers(), nn.Sequential(*layers())
    Pipeline(
        ours, schedule=schedule("gpipe", num_stages=2, num_microbatches=2), group=ALONE, loss=mse
    ).step(x, target)
    for part, wanted in zip(x.split(4), target.split(4), strict=True):
        (mse(plain(part), wanted) / 2).backward()
    for p, q in zip(nn.Sequential(*ours).parameters(), plain.parameters(), strict=True):
        assert bool((p.grad != 0).any())
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def test_evaluation_and_failed_steps_leave_them_alone_and_layers_work_without_the_pipeline():
    ours = layers()
    pipeline = Pipeline(
        ours, schedule=schedule("1f1b", num_stages=2, num_microbatches=2), group=ALONE, loss=mse
    )
    x, target = batch(8, 0)
    pipeline.step(x, target)
    kept = copy.deepcopy(first_norm(ours).state_dict())

    def unchanged() -> bool:
        return all(
            torch.equal(value, kept[name]) for name, value in first_norm(ours).state_dict().items()
        )

    pipeline.eval()
    y = pipeline(x)
    assert unchanged()
    torch.testing.assert_close(y, nn.Sequential(*ours)(x))
    pipeline.train()
    with pytest.raises(RuntimeError):
        pipeline.step(x, target[:2])
    assert unchanged()
    first_norm(ours)(x)  # by itself: torch's
    assert int(first_norm(ours).num_batches_tracked) == 2
    again = copy.deepcopy(ours)
    Pipeline(
        ours, schedule=schedule("gpipe", num_stages=4, num_microbatches=2), group=ALONE, loss=mse
    ).step(x, target)
    assert int(first_norm(ours).num_batches_tracked) == 3
    assert int(first_norm(again).num_batches_tracked) == 2


def test_nothing_cancels():
    rows = 1e4 + 1e-3 * torch.randn(
        4, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    tally = Tally()
    for part in rows.view(-1).split([7, 1000, 2000, 993]):
        tally.add(len(part), part.mean(), part.var())
    torch.testing.assert_close(tally.squares / (tally.count - 1), rows.var(), rtol=1e-6, atol=0)
    torch.testing.assert_close(tally.mean, rows.mean(), rtol=1e-14, atol=0)


def over_ranks(rank: int, group: Any) -> None:
    ours, plain = layers(), nn.Sequential(*layers()).double()
    plan = schedule("1f1b", num_stages=2, num_microbatches=3).with_recompute("always")
    pipeline = Pipeline(
        ours, schedule=plan, group=group, loss=mse, config=PipelineConfig(boundaries=[0, 1, 4])
    )
    for step in range(2):
        x, target = batch(10, step)
        pipeline.step(x, target)
        plain(x.double())
    if rank == 1:
        assert int(ours[3][1].num_batches_tracked) == 2
        torch.testing.assert_close(
            first_norm(ours).running_var.double(),
            first_norm(list(plain)).running_var,
            rtol=1e-5,
            atol=0,
        )
    assert int(pipeline.stages[rank].layers[-1].training) == 1
    with pytest.raises(RuntimeError):
        pipeline.step(x, target[:2])  # fails on the last rank: no rank moves on
    if rank == 1:
        assert int(first_norm(ours).num_batches_tracked) == 2


def test_over_ranks(world):
    world(2).run(over_ranks)


def test_a_closed_pipeline_leaves_the_layers_as_they_were():
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers,
        schedule=schedule("gpipe", num_stages=1, num_microbatches=2),
        group=ALONE,
        loss=nn.functional.mse_loss,
    )
    x = torch.randn(8, 4)
    pipeline.step(x, x)
    assert "forward" in vars(layers[1])
    pipeline.close()
    pipeline.close()
    assert "forward" not in vars(layers[1])
    with pytest.raises(RuntimeError, match="this pipeline is closed; make a new one"):
        pipeline.step(x, x)
    with pytest.raises(RuntimeError, match="this pipeline is closed; make a new one"):
        pipeline(x)
    again = Pipeline(
        layers,
        schedule=schedule("gpipe", num_stages=1, num_microbatches=2),
        group=ALONE,
        loss=nn.functional.mse_loss,
    )
    assert torch.isfinite(again.step(x, x))
