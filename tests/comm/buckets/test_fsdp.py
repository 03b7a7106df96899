"""The reduce-scatter for torch's FSDP2: what it leaves out of one backward comes with the next, and
FSDP trains with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pyops.checkpoint import load, save
from pyops.comm.buckets.fsdp import FSDPReduceScatter, fsdp_reduce_scatter
from pyops.comm.compression.eight_bit import Int8
from pyops.comm.compression.floats import BF16
from pyops.comm.compression.one_bit import OneBit
from pyops.comm.compression.power_sgd import PowerSGD
from pyops.comm.compression.topk import TopK
from tests.grids import full

WIDTH = 13  # divides by no number of ranks: FSDP pads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for p in self.parameters():
            p.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Recording(FSDPReduceScatter):
    """Adds up, in float64, what came in and what went out."""

    def __init__(self, codec: Any) -> None:
        super().__init__(codec)
        self.given, self.came, self.calls = torch.zeros(()).double(), torch.zeros(()).double(), 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        before = input_tensor.clone()
        result = super().__call__(output_tensor, input_tensor, group, op, async_op)
        assert torch.equal(input_tensor, before)
        self.given, self.came = self.given + before.double(), self.came + output_tensor.double()
        self.calls += 1
        return result


def build(codec: Any, *, make: Any = fsdp_reduce_scatter) -> tuple[nn.Module, list[Any]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    made = []
    for module in net.modules():
        if (
            isinstance(module, FSDPModule) and module is not net
        ):  # the root has no parameters of its own
            made.append(make(codec))
            module.set_custom_reduce_scatter(made[-1])
    return net, made


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(5, WIDTH, generator=generator), torch.randn(5, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def _steps(rank: int, group: Any, codec: Any, steps: int) -> list[tuple[float, float]]:
    size = dist.get_world_size(group)
    net, made = build(codec, make=Recording)
    for step in range(steps):
        net.zero_grad()
        loss_of(net, rank, step).backward()
    found = []
    for scatter in made:
        assert scatter.calls == steps
        (memory,) = scatter._memories.values()
        together = torch.stack([scatter.given, memory.worker.double()])
        dist.all_reduce(together, group=group)
        given, carried = (row.chunk(size)[rank] / size for row in together)
        found.append(
            (float((scatter.came + carried - given).abs().max()), float(carried.abs().max()))
        )
    return found


@pytest.mark.parametrize(
    ("size", "codec"),
    [full(2, OneBit(block=64)), (3, OneBit(block=64)), (4, Int8()), (2, TopK(0.1))],
)
def test_nothing_is_lost(world, size: int, codec: Any):
    """Sum of the outputs + mean of the errors = sum of the mean inputs, to the rounding of fp32
    additions."""
    steps = 12
    for found in world(size).run(_steps, codec, steps):
        for lost, carried in found:
            assert lost < steps * size * 2.0**-24 * 8
            assert carried > 1e-4, "so small an error would not be missed"


def _train(rank: int, group: Any, codec: Any) -> tuple[list[Tensor], list[Tensor], float, float]:
    net, _ = build(codec)
    loss_of(net, rank, 0).backward()
    reduced = [p.grad.full_tensor() for p in net.parameters()]
    plain = Net()
    loss_of(plain, rank, 0).backward()
    exact = [p.grad.clone() for p in plain.parameters()]
    for gradient in exact:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(net, rank, 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return reduced, exact, losses[0], losses[-1]


@pytest.mark.full
def test_fsdp_trains_with_it(world):
    for reduced, exact, first, last in world(2).run(_train, Int8(block=64)):
        for ours, mean in zip(reduced, exact, strict=True):
            torch.testing.assert_close(ours, mean, rtol=0, atol=float(mean.abs().max()) / 20)
            assert not torch.equal(ours, mean), "it was not compressed"
        assert last < 0.8 * first


def _resume(rank: int, group: Any, path: str) -> bool:
    net, made = build(BF16())
    for step in range(3):
        net.zero_grad()
        loss_of(net, rank, step).backward()
    save(
        path,
        {"scatter": {str(i): scatter.state_dict() for i, scatter in enumerate(made)}},
        group=group,
    )
    again, others = build(BF16())
    for i, scatter in enumerate(others):
        scatter.load_state_dict(load(path, group=group)[0]["scatter"][str(i)])
    same = []
    for n in (net, again):
        n.zero_grad()
        loss_of(n, rank, 3).backward()
        same.append([p.grad.to_local().clone() for p in n.parameters()])
    plain, _ = build(BF16())
    loss_of(plain, rank, 3).backward()
    assert any(
        not torch.equal(p.grad.to_local(), g)
        for p, g in zip(plain.parameters(), same[0], strict=True)
    ), "errors matter"
    return all(torch.equal(a, b) for a, b in zip(*same, strict=True))


def test_resumes_where_it_was(world, tmp_path):
    assert world(2).run(_resume, str(tmp_path / "c")) == [True, True]


def _refuse(rank: int, group: Any, path: str) -> list[str]:
    told = []
    net, (scatter, *_) = build(Int8())
    loss_of(net, rank, 0).backward()
    x, out = torch.ones(4), torch.ones(2)
    foreign = load(path, group=group)[0]["scatter"]["0"]
    other = fsdp_reduce_scatter(BF16())
    other.load_state_dict(foreign)
    length = int(next(iter(foreign["worker"])))
    calls = [
        lambda: scatter(out, x, group, dist.ReduceOp.MAX),
        lambda: scatter.load_state_dict({**scatter.state_dict(), "codec": "bf16"}),
        lambda: other(torch.ones(length // 3), torch.ones(length), group, dist.ReduceOp.AVG),
        lambda: fsdp_reduce_scatter(PowerSGD(2)),
        lambda: fsdp_reduce_scatter("int8"),
        lambda: fsdp_reduce_scatter(Int8() if rank else BF16())(
            out.clone(), x[:2].repeat(3), group, dist.ReduceOp.SUM
        ),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        told.append(str(caught.value))
    out, later = torch.zeros(2), torch.zeros(2)
    assert scatter(out, torch.ones(6), group, dist.ReduceOp.SUM) is None
    work = scatter(later, torch.ones(6), group, dist.ReduceOp.AVG, async_op=True)
    assert work.wait() is later
    assert (out.tolist(), later.tolist()) == ([3.0, 3.0], [1.0, 1.0])
    return told


def test_refuses(world, tmp_path):
    world(2).run(_resume, str(tmp_path / "c"))
    for told in world(3).run(_refuse, str(tmp_path / "c")):
        assert "knows SUM and AVG" in told[0]
        assert "codec bf16, this run uses int8" in told[1]
        assert "errors are of 2 ranks and this run has 3" in told[2]
        assert "needs whole matrices" in told[3]
        assert "codec is 'int8'; expected a codec such as" in told[4]
        assert "other options" in told[5]
