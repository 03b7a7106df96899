"""Buckets, gathered parts, tiles and copies take as much for a deep model as for a shallow one:
allocated bytes, counted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyops.optim
from pyops.zero import ZeroConfig, ZeroOptimizer
from pyops.zero.hooks.sharded_gradients import ON_THEIR_WAY
from tests.allocated_memory import allocated
from tests.grids import full

WIDTH = 512  # a layer is large beside what autograd and Python keep for it
LAYER = (WIDTH * WIDTH + WIDTH) * 2  # bytes
FEW, MANY = 4, 16  # layers


class Watch(TorchDispatchMode):
    """The most bytes that were allocated after any operation within."""

    most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.most = max(self.most, allocated())
        return out


def _beyond(
    group: Any, layers: int, stage: int, name: str, offload: str | None, overlap: bool
) -> int:
    """The most bytes, in two steps, beyond parameters, gradients and states."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).bfloat16()
    cls = getattr(
        torch.optim if name.startswith("torch.") else pyops.optim, name.removeprefix("torch.")
    )
    zero = ZeroOptimizer(
        net,
        cls,
        ZeroConfig(
            stage=stage,
            bucket_bytes=LAYER,
            tile_bytes=1 << 16,
            offload=offload or "none",
            overlap_grad_reduce=overlap,
            max_grad_norm=1.0,
        ),
        group=group,
        lr=1e-3,
    )
    x = torch.randn(1, WIDTH).bfloat16()

    def step() -> None:
        net(x).float().square().mean().backward()
        zero.step()

    step()
    step()
    gc.collect()
    kept = allocated()
    of_gradients = (
        zero.memory()["gradients"] if stage > 1 else 0
    )  # those of stage 1 stay, and are in `kept`
    with Watch() as watch:
        step()
        step()
    return watch.most - kept - of_gradients


def _both(rank: int, group: Any, *options: Any) -> tuple[int, int]:
    _beyond(group, FEW, *options)  # what libraries keep
    return _beyond(group, FEW, *options), _beyond(group, MANY, *options)


@pytest.mark.parametrize(
    ("size", "stage", "name", "place", "overlap"),
    [
        full(2, 1, "AdamW", None, True),
        full(2, 1, "torch.AdamW", None, True),
        full(2, 2, "AdamW", None, False),
        full(2, 2, "torch.AdamW", None, True),
        (2, 3, "AdamW", None, True),
        full(2, 3, "torch.AdamW", "disk", True),
        full(2, 2, "torch.AdamW", "cpu", True),
        (1, 2, "AdamW", "cpu", True),
        full(1, 2, "AdamW", "disk", True),
        full(1, 1, "torch.AdamW", "disk", True),
    ],
)
def test_buffers_do_not_grow_with_the_model(world, tmp_path, size, stage, name, place, overlap):
    offload = {None: None, "cpu": "cpu", "disk": str(tmp_path)}[place]
    for few, many in world(size).run(_both, stage, name, offload, overlap):
        # Of buckets that travel while backward goes on, none or all may have arrived at the moment
        # that takes most: which, depends on what else the machine does.
        on_their_way = ON_THEIR_WAY * LAYER if overlap else 0
        assert many - few < on_their_way + LAYER / 2, (few, many)
        assert many < 8 * LAYER
