"""Loops of Lightning Fabric over pyops: its optimizers where Fabric wraps the model, and a
ZeroOptimizer, or DataParallel, in the place of the wrapper."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.data_parallel import DataParallel
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.hf.runs import launched

pytestmark = pytest.mark.cpu_only

STEPS, CLIPPED = 6, 0.1


def _loop(kind: str, precision: str) -> list[float]:
    """Losses of a loop that clips, by the loaders, backward and autocast of Fabric."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    x = torch.randn(8 * STEPS, 16)
    rows = torch.utils.data.TensorDataset(x, x.mean(dim=1, keepdim=True))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=4))
    zero: ZeroOptimizer | None = None
    if kind in ("torch", "pyops"):
        made = (torch.optim.AdamW if kind == "torch" else AdamW)(model.parameters(), lr=3e-2)
        model, optimizer = fabric.setup(model, made)
    elif kind == "data parallel":
        model = DataParallel(model)
        optimizer = fabric.setup_optimizers(AdamW(model.parameters(), lr=3e-2))
    else:
        zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=int(kind[-1])), lr=3e-2)
        optimizer = fabric.setup_optimizers(zero)
    losses = []
    for inputs, wanted in loader:
        with fabric.autocast():
            loss = (model(inputs) - wanted).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(fabric, loss))
    if zero is not None:
        with pytest.raises(RuntimeError, match="use the model by itself"):
            fabric.setup(model, zero)
        zero.close()
    return losses


def _mean(fabric: Any, loss: Tensor) -> float:
    return float(fabric.all_reduce(loss.detach().float()))


def _losses(rank: int, group: Any, kinds: list[str], precision: str) -> list[list[float]]:
    found = []
    for kind in kinds:
        with launched(rank, group):
            # what torchrun sets besides, by which Fabric knows that it has started the processes
            more = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
            os.environ.update(more, TORCHELASTIC_RUN_ID="tests")
            found.append(_loop(kind, precision))
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_loop_of_fabric_over_pyops_is_the_loop_over_ddp(world, precision: str):
    pytest.importorskip("lightning_fabric", reason="needs lightning-fabric, which is no extra")
    kinds = ["torch", "pyops", "data parallel", "stage 0", "stage 1", "stage 2", "stage 3"]
    for plain, *others in world(2).run(_losses, kinds, precision):
        assert plain[0] - plain[-1] > 0.01, "nothing is learnt"
        for losses in others:
            assert losses == pytest.approx(plain, abs=1e-6 if precision == "32-true" else 1e-3)
