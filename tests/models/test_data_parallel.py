"""Every model learns the same with its batch cut over ranks, its layers cut or not, its gradients
reduced or its states cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.data_parallel import DataParallel
from pyops.mesh import ALONE, Axes, Mesh
from pyops.tensor_parallel import sync_partial_grads
from tests.grids import full
from tests.models.families import BATCH, LENGTH, loss_of, make
from tests.zero.making import zero_optimizer

pytestmark = pytest.mark.on_device

STEPS = 12  # 50 under `-m full`
OPTIONS = {"lr": 5e-3, "eps": 1e-6}


def curve(
    name: str,
    *,
    steps: int,
    tp: int = 1,
    stage: int | None = None,
    sequence_parallel: bool = False,
) -> list[float]:
    """Losses of the whole batch. Two or more data-parallel ranks have unequal parts of it; stage
    None: DataParallel."""
    dp = dist.get_world_size() // tp if dist.is_initialized() else 1
    mesh = Mesh(Axes(dp=dp, tp=tp))
    group, tp_group = mesh.group("dp"), mesh.group("tp") if tp > 1 else None
    shared_by = ALONE if tp_group is None else tp_group
    model = make(name, num_layers=1, group=shared_by, sequence_parallel=sequence_parallel)
    through: Any = model
    if stage is None:
        through = DataParallel(model, group=group, reduction="sum") if dp > 1 else model
        optimizer: Any = torch.optim.AdamW(model.parameters(), **OPTIONS)
    else:
        optimizer = zero_optimizer(
            model,
            torch.optim.AdamW,
            stage=stage,
            reduction="sum",
            group=group,
            tp_group=tp_group,
            **OPTIONS,
        )
    rows = BATCH // dp + (mesh.rank("dp") < BATCH % dp)
    first_row = 0 if mesh.rank("dp") == 0 else BATCH - rows
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(
            model, step=step, first_row=first_row, rows=rows, reduction="sum", through=through
        ) / (BATCH * LENGTH)
        loss.backward()
        if stage is None:
            sync_partial_grads(model, group=shared_by)
        optimizer.step()
        total = loss.detach().clone()
        if dp > 1:
            dist.all_reduce(total, group=group)
        found.append(total.item())
    return found


def curves(
    rank: int,
    group: Any,
    families: tuple[str, ...],
    steps: int,
    tp: int,
    stage: int | None,
    sequence_parallel: bool,
) -> dict[str, list[float]]:
    return {
        name: curve(name, steps=steps, tp=tp, stage=stage, sequence_parallel=sequence_parallel)
        for name in families
    }


@functools.cache
def alone(families: tuple[str, ...], steps: int) -> dict[str, list[float]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {name: curve(name, steps=steps) for name in families}
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("families", [("t5", "vit"), full(("gpt", "bert"))], ids="+".join)
@pytest.mark.parametrize("steps", [STEPS, full(50)])
@pytest.mark.parametrize(
    ("ranks", "tp", "stage", "sequence_parallel"),
    [
        (4, 2, None, True),
        *(full(*each) for each in ((2, 1, 1, False), (2, 1, 2, False), (4, 2, 3, True))),
    ],
)
def test_loss_curves_are_those_of_one_process(
    world, families, steps, ranks, tp, stage, sequence_parallel
):
    found = world(ranks).run(curves, families, steps, tp, stage, sequence_parallel, timeout=180.0)
    for family, wanted in alone(families, steps).items():
        assert wanted[-1] < 0.9 * wanted[0], (
            f"{family} learns nothing, so this shows nothing: {wanted}"
        )
        for rank, run in enumerate(found):
            errors = [abs(f - w) for f, w in zip(run[family], wanted, strict=True)]
            assert max(errors) <= 1e-5, (family, rank, max(errors))
