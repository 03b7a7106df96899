"""States in host memory or in files: the same bits, less memory, and a checkpoint that does not
know of it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyops.optim
from pyops import checkpoint
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.grids import cut
from tests.zero.models import Net, groups, mean_loss, part

pytestmark = pytest.mark.on_device


def _run(
    rank: int,
    group: Any,
    stage: int,
    name: str,
    dtype: torch.dtype,
    offload: str | None,
    folder: str | None,
) -> tuple[dict[str, Tensor], int]:
    """Six steps with a checkpoint in the middle, taken up by another optimizer; the parameters, and
    the bytes of states."""
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )

    def make() -> tuple[Net, ZeroOptimizer]:
        model = Net(mixed=False).to(dtype)
        zero = ZeroOptimizer(
            model,
            cls,
            ZeroConfig(
                stage=stage, offload=offload or "none", bucket_bytes=2000, max_grad_norm=0.2
            ),
            group=group,
            params=groups(model),
            lr=1e-2,
        )
        return model, zero

    model, zero = make()
    for step in range(6):
        x, y = part(step, rank, dist.get_world_size(group))
        mean_loss(model, x.to(dtype), y.to(dtype), sometimes=step % 2 == 1).backward()
        zero.step()
        if step == 2 and folder is not None:
            checkpoint.save(
                folder,
                {"model": zero.model_state_dict(), "optimizer": zero.state_dict()},
                group=group,
            )
            model, zero = make()
            state, _ = checkpoint.load(folder)
            zero.load_model_state_dict(state["model"])
            zero.load_state_dict(state["optimizer"])
    kept = zero.memory()["states"]
    with zero.whole_parameters():
        return {n: p.detach().clone() for n, p in model.named_parameters()}, kept


GRID = [
    (name, dtype, stage, place)
    for (stage, place), name, dtype in itertools.product(
        ((2, "cpu"), (2, "disk"), (3, "disk")),
        ("AdamW", "torch.AdamW"),
        (torch.float32, torch.bfloat16),
    )
]
# Every pair of two axes' values.
KEPT = [
    ("AdamW", torch.float32, 2, "cpu"),
    ("AdamW", torch.bfloat16, 2, "disk"),
    ("torch.AdamW", torch.float32, 3, "disk"),
]


@pytest.mark.parametrize(("name", "dtype", "stage", "place"), cut(GRID, keep=KEPT))
def test_offloaded_states_give_the_same_bits(
    world, tmp_path: Path, name: str, dtype: torch.dtype, stage: int, place: str
):
    expected, plain_bytes = world(2).run(_run, stage, name, dtype, None, None)[0]
    assert plain_bytes > 0
    offload = "cpu" if place == "cpu" else str(tmp_path)
    for folder in (None, str(tmp_path / "checkpoint")):
        for found, _ in world(2).run(_run, stage, name, dtype, offload, folder):
            for n, p in expected.items():
                assert torch.equal(found[n], p), (n, folder)


def _refuse(rank: int, group: Any, offload: str) -> str:
    try:
        ZeroOptimizer(
            Net(mixed=False),
            pyops.optim.LAMB if offload == "cpu" else pyops.optim.AdamW,
            ZeroConfig(stage=1, offload=offload or "none"),
            group=group,
            lr=1e-3,
        )
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("offload", "words"), [("/no/such/folder", "a folder that exists"), ("cpu", "LAMB")]
)
def test_refuses(world, offload: str, words: str):
    assert not os.path.exists("/no/such/folder")
    for said in world(2).run(_refuse, offload):
        assert words in said
