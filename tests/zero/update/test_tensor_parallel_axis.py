"""ZeroOptimizer over a grid: parameters cut over one axis, states over the other, and the steps of
one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import checkpoint
from pyops.comm import all_reduce
from pyops.flat import Placement
from pyops.mesh import Axes, Mesh
from pyops.optim import LAMB, AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import cut
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.on_device

BATCH, D, F, OUT = 4, 6, 10, 3
STEPS = 4
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05}


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return all_reduce(x.clone(), group=group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Cut(nn.Module):
    """scale, up (cut along rows, padded for 4 ranks), two copies of a gate, on neighbors and far
    apart, down (cut along columns), box (cut along both), bias.

    The input's edge is left out, so that each rank has only a part of the gradient of `scale`, as
    under sequence parallelism.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        rank, ranks = (
            (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        )
        copies = 2 if ranks == 4 else 1
        columns = 2 if ranks == 4 else 1
        lines = ranks // columns
        self.placements = {
            "scale": Placement.whole((D,), rank=rank, ranks=ranks, partial=True),
            "up": Placement.cut((F, D), dim=0, rank=rank, ranks=ranks),
            "down": Placement.cut((OUT, F), dim=1, rank=rank, ranks=ranks),
            "gate": Placement.cut((2, D), dim=0, rank=rank, ranks=ranks, copies=copies),
            "far": Placement.grid(
                (2, D),
                parts={0: (rank % (ranks // copies), ranks // copies)},
                copy=rank // (ranks // copies),
                copies=copies,
                partial=True,
            ),
            "box": Placement.grid(
                (4, D), parts={0: (rank // columns, lines), 1: (rank % columns, columns)}
            ),
        }
        generator = torch.Generator().manual_seed(5)
        for name, placement in self.placements.items():
            whole = torch.randn(placement.global_shape, generator=generator)
            self.register_parameter(name, nn.Parameter(placement.take(whole)))
        self.bias = nn.Parameter(torch.randn(OUT, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        hidden = torch.relu(x @ self.up.t())
        y = hidden @ self.down.t()
        copies = self.placements["gate"].copies
        for gate in (self.gate, self.far):  # each copy does its share
            y = y + torch.relu(x @ gate.t()).sum(1, keepdim=True) / copies
        place = self.placements["box"]
        columns, first = place.cuts[1], place.cuts[0].start
        box = x[:, columns.start : columns.stop] @ place.part(self.box).t()
        weights = torch.arange(first, first + box.shape[1]) + 1.0  # each row counts otherwise
        y = y + (box * weights.to(box.device)).sum(1, keepdim=True) / 10
        return (y if self.group is None else _Sum.apply(y, self.group)) + self.bias


def _data(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(BATCH, D, generator=generator), torch.randn(BATCH, OUT, generator=generator)
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def _steps(
    model: nn.Module, optimizer: Any, *, rank: int, ranks: int, first: int, last: int
) -> list[float]:
    norms = []
    for step in range(first, last):
        x, y = _data(step, rank, ranks)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return norms


def _one_process(steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    model = Cut()
    norms = _steps(
        model,
        optimizer := AdamW(model.parameters(), **OPTIONS),
        rank=0,
        ranks=1,
        first=0,
        last=steps,
    )
    assert optimizer.param_groups
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def _on_grid(
    rank: int, group: Any, dp: int, tp: int, stage: int, folder: str, first: int, last: int
) -> list[float]:
    mesh = Mesh(Axes(dp=dp, tp=tp))
    model = Cut(mesh.group("tp"))
    optimizer = zero_optimizer(
        model, AdamW, stage=stage, group=mesh.group("dp"), tp_group=mesh.group("tp"), **OPTIONS
    )
    path = Path(folder)
    if first:
        state, _ = checkpoint.load(path, lazy=True)
        optimizer.load_model_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    norms = _steps(model, optimizer, rank=mesh.rank("dp"), ranks=dp, first=first, last=last)
    saved = {"model": optimizer.model_state_dict(), "optimizer": optimizer.state_dict()}
    # What a rank gave, it takes again.
    optimizer.load_model_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    checkpoint.save(path, saved)
    with optimizer.whole_parameters():
        for name, p in model.named_parameters():
            place = Placement.of(model).get(name)
            if place is not None:
                assert torch.equal(p.count_nonzero(), place.part(p).count_nonzero()), (
                    "padding stays zero"
                )
    return norms


@pytest.mark.parametrize(
    ("dp", "tp", "stage"),
    cut(
        [(dp, tp, stage) for dp, tp in ((1, 2), (2, 2), (1, 3), (1, 4)) for stage in (0, 1, 2, 3)],
        keep=[(1, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3), (1, 3, 3), (1, 4, 0)],
    ),
)
def test_a_grid_takes_the_steps_of_one_process(
    world, tmp_path: Path, dp: int, tp: int, stage: int
) -> None:
    expected, norms = _one_process()
    found = world(dp * tp).run(_on_grid, dp, tp, stage, str(tmp_path / "a"), 0, STEPS)
    for of_rank in found:
        assert of_rank == found[0], "the norm is the same on every rank"
        torch.testing.assert_close(torch.tensor(of_rank), torch.tensor(norms), rtol=1e-5, atol=0)
    assert max(norms) > OPTIONS["max_grad_norm"], "clipping takes place"
    state, _ = checkpoint.load(tmp_path / "a")
    for name, whole in expected.items():
        torch.testing.assert_close(
            state["model"][name],
            whole.cpu(),
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        assert state["optimizer"]["state"][name]["exp_avg"].shape == whole.shape


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2, 1), (2, 2, 3)), ((2, 2, 2), (1, 1, 0)), ((1, 1, 1), (1, 3, 2))]
)
def test_a_checkpoint_of_one_grid_goes_on_in_another(
    world, tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    expected, _ = _one_process(2 * STEPS)
    folder = str(tmp_path / "a")
    world(before[0] * before[1]).run(_on_grid, *before, folder, 0, STEPS)
    world(after[0] * after[1]).run(_on_grid, *after, folder, STEPS, 2 * STEPS)
    state, _ = checkpoint.load(folder)
    for name, whole in expected.items():
        torch.testing.assert_close(
            state["model"][name],
            whole.cpu(),
            rtol=2e-5,
            atol=2e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def _refused(rank: int, group: Any) -> list[str]:
    mesh = Mesh(Axes(dp=1, tp=2))
    messages = []
    for cls, dp in ((LAMB, mesh.group("dp")), (AdamW, None)):
        model = Cut(mesh.group("tp"))
        with pytest.raises(ValueError) as caught:
            ZeroOptimizer(
                model, cls, ZeroConfig(stage=1), group=dp, tp_group=mesh.group("tp"), lr=1e-2
            )
        messages.append(str(caught.value))
    return messages


def test_refusals_say_why(world) -> None:
    for lamb, groups in world(2).run(_refused):
        assert "LAMB goes by sums over each layer" in lamb
        assert (
            "tp_group is of ranks [0, 1], group of ranks [0, 1]; they must have only rank" in groups
        )


def _overflow_on_one_rank(rank: int, group: Any, stage: int) -> list[float]:
    mesh = Mesh(Axes(tp=2, dp=1))
    model = Cut(mesh.group("tp"))
    zero = ZeroOptimizer(
        model,
        torch.optim.SGD,
        ZeroConfig(stage=stage),
        group=mesh.group("dp"),
        tp_group=mesh.group("tp"),
        lr=0.1,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(2):
        scaler.scale(model(torch.ones(BATCH, D)).square().mean()).backward()
        if step == 0 and rank == 1:
            with torch.no_grad():
                model.up.grad.mul_(torch.inf)
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_on_one_tensor_parallel_rank_halves_torchs_scale_on_all(world, stage: int):
    assert world(2).run(_overflow_on_one_rank, stage) == [[4.0, 4.0]] * 2
