"""Parameters that some of the data-parallel ranks hold, beside others that all do: summed over
their own ranks, by DataParallel and every stage of ZeRO, with the losses, norms and states of one
process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops import checkpoint
from pyops.comm import OneBit
from pyops.data_parallel import DataParallel
from pyops.flat import Placement
from pyops.mesh import Axes, Mesh
from pyops.optim import LAMB, AdamW
from pyops.tensor_parallel import clip_grad_norm_
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import cut

pytestmark = pytest.mark.cpu_only

ROWS, D = 8, 6
STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.3}


class Parts(nn.Module):
    """Rows of the batch are shared out over dp, and over cp again.

    shared, scale   on all ranks                     each computes with its own rows
    columns         another half on each cp rank     with the rows of all cp ranks: summed over dp
    copied          the same on all ranks            likewise
    alone           another quarter on each rank     with all rows: summed over nothing
    """

    shared: Tensor
    scale: Tensor
    columns: Tensor
    copied: Tensor
    alone: Tensor

    def __init__(self, mesh: Mesh | None = None, *, seed: int = 5) -> None:
        super().__init__()
        self.mesh = mesh
        self.dp, self.cp = (
            (0, 1) if mesh is None else (mesh.rank(axis), mesh.size(axis)) for axis in ("dp", "cp")
        )
        (dp, dps), (cp, cps) = self.dp, self.cp
        self.placements = {
            "columns": replace(Placement.cut((4, D), dim=0, rank=cp, ranks=cps), reduce=("dp",)),
            "copied": replace(Placement.whole((3, D), rank=cp, ranks=cps), reduce=("dp",)),
            "alone": replace(
                Placement.cut((8, D), dim=0, rank=dp * cps + cp, ranks=dps * cps), reduce=()
            ),
        }
        generator = torch.Generator().manual_seed(seed)
        shapes = {"shared": (D, D), "scale": (D,)}
        shapes |= {name: place.global_shape for name, place in self.placements.items()}
        for name, shape in shapes.items():
            whole = torch.randn(shape, generator=generator) / 2
            place = self.placements.get(name)
            self.register_parameter(name, nn.Parameter(place.take(whole) if place else whole))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's gradients are of, and its summand of the loss."""
        rows = x.chunk(self.dp[1])[self.dp[0]]
        hidden = torch.tanh(rows @ self.shared.t() * self.scale)
        total = (hidden.chunk(self.cp[1])[self.cp[0]] - 0.3).pow(2).sum()
        for name, inputs in (("columns", hidden), ("alone", x)):
            first = self.placements[name].start
            y = inputs @ self.get_parameter(name).t()
            weights = torch.arange(first, first + y.shape[1]) + 1.0  # each row counts otherwise
            total = total + ((y - 0.5).square() * weights).sum()
        copied = (rows @ self.copied.t() - 1).square().sum()
        return (total + copied) / ROWS, (total + copied / self.cp[1]).detach() / ROWS


def _steps(model: Any, optimizer: Any, steps: range, *, scale: float = 1.0) -> list[list[float]]:
    """[loss, norm] of each; the loss is this rank's summand."""
    found = []
    for step in steps:
        x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(100 + step))
        backward, loss = model(x)
        (backward * scale).backward()
        norm = None
        if isinstance(model, DataParallel):
            inner: Any = model.module
            norm = clip_grad_norm_(inner, OPTIONS["max_grad_norm"], group=inner.mesh)
        optimizer.step()
        found.append([float(loss), float(optimizer.grad_norm if norm is None else norm)])
        (model if isinstance(model, DataParallel) else optimizer).zero_grad()
    return found


def _one_process(steps: int, **options: Any) -> tuple[Tensor, Parts, AdamW]:
    model = Parts()
    optimizer = AdamW(list(model.parameters()), **options)
    return torch.tensor(_steps(model, optimizer, range(steps))), model, optimizer


def _summed(found: list[Any]) -> Tensor:
    """Losses summed over the ranks, and the norm, which is that of each."""
    ranks = torch.tensor(found)
    assert (ranks[..., 1] == ranks[:1, :, 1]).all()
    return torch.stack([ranks[..., 0].sum(0), ranks[0, :, 1]], 1)


def _zero(
    rank: int, group: Any, axes: Axes, stage: int, reduction: str, folder: str, steps: range
) -> list[list[float]]:
    mesh = Mesh(axes)
    model = Parts(mesh, seed=5 if steps.start == 0 or rank == 0 else 6)
    config = ZeroConfig(
        stage=stage, reduction=reduction, bucket_bytes=64, whole_below=5, max_grad_norm=0.3
    )
    options = {key: OPTIONS[key] for key in ("lr", "weight_decay")}
    optimizer = ZeroOptimizer(model, AdamW, config, mesh=mesh, **options)
    if steps.start:
        state, _ = checkpoint.load(Path(folder), lazy=True)
        optimizer.load_model_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    found = _steps(model, optimizer, steps, scale=1.0 if reduction == "sum" else 4.0)
    if steps.start == 0:
        state = {"model": optimizer.model_state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(Path(folder), state, group=group)
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("stage", "reduction"),
    cut(
        [(stage, reduction) for stage in range(4) for reduction in ("sum", "mean")],
        keep=[(1, "mean"), (3, "sum")],
    ),
)
def test_zero_has_the_losses_norms_and_states_of_one_process(
    world: Any, tmp_path: Path, stage: int, reduction: str
) -> None:
    expected, *_ = _one_process(STEPS + 2, **OPTIONS)
    _, model, optimizer = _one_process(STEPS, **OPTIONS)
    grid, folder = Axes(dp=2, cp=2), str(tmp_path / "saved")
    found = world(4).run(_zero, grid, stage, reduction, folder, range(STEPS))
    torch.testing.assert_close(_summed(found), expected[:STEPS], rtol=1e-5, atol=1e-6)
    saved, _ = checkpoint.load(Path(folder))
    for name, p in model.named_parameters():
        torch.testing.assert_close(saved["model"][name], p.detach(), rtol=1e-5, atol=1e-6)
        ours, theirs = saved["optimizer"]["state"][name], optimizer.state[p]
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours[key].view_as(p), theirs[key], rtol=1e-4, atol=1e-7)
    later = range(STEPS, STEPS + 2)
    for axes in (Axes(dp=4), Axes(cp=4)):
        found = world(4).run(_zero, axes, 3 - stage, "sum", folder, later)
        torch.testing.assert_close(_summed(found), expected[STEPS:], rtol=1e-5, atol=1e-6)


def _data_parallel(rank: int, group: Any, reduction: str) -> tuple[list[Any], dict[str, Tensor]]:
    mesh = Mesh(Axes(dp=2, cp=2))
    inner = Parts(mesh)
    if rank:  # what all hold begins as on rank 0, what some hold as on the first of them
        inner.shared.data.zero_()
    if mesh.rank("dp"):
        inner.columns.data.zero_()
    model = DataParallel(inner, mesh=mesh, reduction=reduction, bucket_bytes=64)
    options = {key: OPTIONS[key] for key in ("lr", "weight_decay")}
    optimizer = AdamW([buffer.parameter for buffer in model.flat], **options)
    found = _steps(model, optimizer, range(STEPS), scale=1.0 if reduction == "sum" else 4.0)
    values = {name: p.detach().clone() for name, p in inner.named_parameters()}
    model.close()
    return found, values


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_data_parallel_has_the_losses_of_one_process(world: Any, reduction: str) -> None:
    expected, *_ = _one_process(STEPS, **OPTIONS)
    ranks = world(4).run(_data_parallel, reduction)
    found = _summed([steps for steps, _ in ranks])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (_, first), (_, beside), (_, below), _ = ranks
    for name in ("shared", "scale", "copied"):
        assert torch.equal(first[name], beside[name])
    assert torch.equal(first["columns"], below["columns"])
    assert not torch.equal(first["columns"], beside["columns"])
    assert not torch.equal(first["alone"], below["alone"])


def _refused(rank: int, group: Any) -> list[str]:
    mesh, found = Mesh(Axes(dp=2, cp=2)), []
    for make in (
        lambda: DataParallel(Parts(mesh), mesh=mesh, codec=OneBit()),
        lambda: DataParallel(Parts(mesh), mesh=mesh, algorithm="symmetric"),
        lambda: ZeroOptimizer(Parts(mesh), LAMB, ZeroConfig(1), mesh=mesh),
        lambda: ZeroOptimizer(Parts(mesh), AdamW, ZeroConfig(1, symmetric_step=True), mesh=mesh),
        lambda: ZeroOptimizer(
            Parts(mesh), AdamW, ZeroConfig(3, secondary_group=mesh.group("dp")), mesh=mesh
        ),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        found.append(str(caught.value))
    model = Parts(mesh)
    optimizer = ZeroOptimizer(model, AdamW, ZeroConfig(0), mesh=mesh)
    model(torch.ones(ROWS, D))[0].backward()
    with pytest.raises(RuntimeError, match=r"of other elements on other ranks, are taken in step"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="what some ranks hold of a parameter"):
        optimizer.gradient_squares()
    dist.barrier()
    return found


def test_what_does_not_go_with_them_is_refused_on_all_ranks(world: Any) -> None:
    everyone = world(4).run(_refused)
    assert everyone == everyone[:1] * 4
    for words, message in zip(
        ("codec", "symmetric", "LAMB", "symmetric_step", "secondary_group"),
        everyone[0],
        strict=True,
    ):
        assert f"{words} " in message or f"{words}," in message, message
        assert "columns" in message
        assert "summed over dp" in message
