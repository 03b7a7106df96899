"""Stage 3: parameters whose values are elsewhere. What looks at them is told how, or in forward and
backward is given them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.zero.models import Net, mean_loss, part

WIDTH = 12


def _looks(model: nn.Module, weight: nn.Parameter) -> dict[str, Callable[[], Any]]:
    return {
        "norm": lambda: weight.norm(),
        "data": lambda: weight.data.add_(1.0),
        "index": lambda: weight[0],
        "list": lambda: weight.tolist(),
        "deepcopy": lambda: copy.deepcopy(model),
        "ema": lambda: torch.optim.swa_utils.AveragedModel(model),
        "lerp": lambda: torch.lerp(torch.zeros(weight.shape), weight, 0.1),
        "foreach": lambda: torch._foreach_norm([weight]),
        "half": lambda: model.half(),
        "type": lambda: weight.type(dtype=torch.half),
        "format": lambda: weight.to(memory_format=torch.contiguous_format),
        "layout": lambda: weight.to(memory_format=torch.channels_last),
        "layout of fp32": lambda: weight.float(memory_format=torch.contiguous_format),
        "layout on the CPU": lambda: weight.cpu(memory_format=torch.contiguous_format),
        "save": lambda: torch.save(model, io.BytesIO()),
        "load": lambda: nn.init.zeros_(weight),
        "ddp": lambda: nn.parallel.DistributedDataParallel(model),
        "op": lambda: torch.ops.aten.sum.default(weight),
        "numpy": lambda: weight.detach().numpy(),
        "vector": lambda: nn.utils.parameters_to_vector(model.parameters()),
        "inside": lambda: model.blocks[0].inner.forward(torch.ones(1, 10)),
    }


def _look(rank: int, group: Any) -> tuple[dict[str, str], dict[str, Any]]:
    model = Net(mixed=False)
    zero = ZeroOptimizer(model, AdamW, ZeroConfig(stage=3), group=group, lr=1e-3)
    weight = model.blocks[1].inner.weight
    said = {}
    for how, look in _looks(model, weight).items():
        try:
            look()
            said[how] = "nothing"
        except RuntimeError as error:
            said[how] = str(error)
    allowed = {
        "count": sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in Net(mixed=False).parameters()),
        "shape": weight.shape == (30, 10),
        "print": "Linear" in str(model),
        "repr": "(30, 10)" in repr(weight),
        "parameter": isinstance(weight, nn.Parameter),
        "to": model.to("cpu").float().cpu() is model and weight.grad is None,
        "same layout": weight.to(memory_format=torch.preserve_format) is weight,
        "to its own index": model.to("cpu:0") is model and "spread" in repr(weight),
        "same object": model.blocks[1].inner.weight is weight,
        "optimizer": len(torch.optim.SGD(model.parameters()).param_groups) == 1,
        "zero_grad": model.zero_grad() is None,
        "bytes": weight.nbytes == 1200,
        "mode": model.eval().train() is model,
    }
    mean_loss(model, *part(0, rank, 2)).backward()
    zero.step()
    with zero.whole_parameters():
        assert type(weight) is nn.Parameter
        kept = model.state_dict()
        mine = {name: tensor.clone() for name, tensor in kept.items()}
    for step in range(2):  # what was taken within the block stays, and holds what it held
        mean_loss(model, *part(step, rank, 2)).backward()
        zero.step()
    allowed["state dict"] = all(torch.equal(kept[name], mine[name]) for name in mine)
    zero.close()
    allowed["closed"] = type(weight) is nn.Parameter and float(weight.norm()) > 0
    return said, allowed


def test_whoever_looks_at_spread_parameters_is_told_how(world):
    for said, allowed in world(2).run(_look):
        assert "pyops.hf.prepare" in said.pop("ddp")  # whole parameters would not help
        assert {how for how, text in said.items() if "whole_parameters()" not in text} == set()
        assert "blocks.1.inner.weight" in said["norm"]
        assert [how for how, fine in allowed.items() if not fine] == []


class Bias(nn.Module):
    """A table that attention reads by a method, not by a call, and that a later block reads
    again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self) -> Tensor:
        return self.table[:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.linear = Bias(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, also: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(x + self.bias.table)) + (0.0 if also is None else also * x)


class Outside(nn.Module):
    """Each of its blocks is a unit; the first one's table is used outside of it, before and after,
    and a list has tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.tables = nn.ModuleList(Bias() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[2].bias.table  # read before its unit has computed
        first = self.tables[0]()  # a view that a unit gives away
        for block in self.blocks:
            x = block(x, self.blocks[0].bias.table.exp())  # and after
        return torch.tanh(x * first + self.blocks[1].linear.weight.mean())


def _outside(rank: int, group: Any, stage: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    size = dist.get_world_size(group)
    model = Outside()
    zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1)
    losses = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(4):
            torch.manual_seed(step)
            loss = model(torch.randn(12, WIDTH).chunk(size)[rank]).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            zero.step()
            with torch.no_grad():
                losses.append(float(model(torch.ones(1, WIDTH)).sum()))
    with zero.whole_parameters():
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
    return (
        losses,
        state,
        [str(each.message) for each in seen if "ZeroOptimizer" in str(each.message)],
    )


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_used_outside_of_their_unit_widen_it(world, size: int):
    for (plain, expected, _), (losses, state, said) in zip(
        world(size).run(_outside, 1), world(size).run(_outside, 3), strict=True
    ):
        assert losses == plain
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        for unit in ("blocks.0", "blocks.1", "blocks.2", "tables.0"):
            assert sum(f" {unit}" in each for each in said) >= 1, unit
        assert len(said) == 4
