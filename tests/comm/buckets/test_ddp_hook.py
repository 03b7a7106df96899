"""The hook for torch's DistributedDataParallel: errors follow their parameters when DDP lays its
buckets out anew."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyops.checkpoint import load, save
from pyops.comm.buckets.ddp import ddp_hook
from pyops.comm.compression.eight_bit import Int8
from pyops.comm.compression.one_bit import OneBit
from pyops.flat import Shard

WIDTH = 24
CODEC = OneBit(block=64)


class Net(nn.Module):
    """Layers used in another order than they are registered in, so that DDP moves them between
    buckets."""

    def __init__(self, *, with_unused: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.b, self.d, self.a, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if with_unused:
            self.unused = nn.Linear(3, 3)
        for p in self.parameters():
            p.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(5, WIDTH, generator=generator), torch.randn(5, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def local_gradients(rank: int, steps: int) -> dict[str, Tensor]:
    net = Net()
    for step in range(steps):
        loss_of(net, rank, step).backward()
    return {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None}


def carried(state: Any, group: Any) -> dict[str, Tensor]:
    """By parameter, what the errors of all ranks will still add to the mean."""
    size = dist.get_world_size(group)
    found: dict[tuple[str, str], Tensor] = {}
    gathered: list[Any] = [None] * size
    mine = {
        (kind, n): (s.global_shape, s.offset, s.tensor.clone())
        for kind in ("worker", "server")
        for n, s in state.state_dict()[kind].items()
        if isinstance(s, Shard)
    }
    dist.all_gather_object(gathered, mine, group=group)
    for part in gathered:
        for key, (shape, offset, tensor) in part.items():
            place = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            found.setdefault(key, torch.full(shape, torch.nan).double())[place] = tensor.double()
    return {
        n: rows.mean(dim=0) + found["server", n].view(rows.shape[1:])
        for (kind, n), rows in found.items()
        if kind == "worker"
    }


def make(group: Any, *, codec: Any = CODEC, **options: Any) -> tuple[DistributedDataParallel, Any]:
    net = Net(with_unused=options.get("find_unused_parameters", False))
    state, hook = ddp_hook(codec, group=group, model=net)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.006, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def _steps(
    rank: int, group: Any, options: dict[str, Any], accumulate: bool, steps: int
) -> tuple[Any, ...]:
    ddp, state = make(group, **options)
    total = {name: torch.zeros_like(p).double() for name, p in ddp.module.named_parameters()}
    buckets = []
    for step in range(steps):
        last = not accumulate or step % 2 == 1
        if not accumulate or step % 2 == 0:
            ddp.zero_grad()
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss_of(ddp, rank, step).backward()
        if last:
            buckets.append(sorted(state._memories))
            for name, p in ddp.module.named_parameters():
                total[name] += 0.0 if p.grad is None else p.grad.double()
    return total, carried(state, group), buckets[0] != buckets[-1], len(buckets[-1])


@pytest.mark.parametrize(
    ("size", "options", "accumulate"),
    [
        (2, {}, False),
        (3, {"gradient_as_bucket_view": True}, False),
        (2, {"gradient_as_bucket_view": True}, True),
        (3, {"static_graph": True}, False),
        (2, {"find_unused_parameters": True}, False),
        (4, {}, True),
    ],
)
def test_nothing_is_lost_when_buckets_change(
    world, size: int, options: dict[str, Any], accumulate: bool
):
    """Sum of DDP's gradients + what the errors carry = sum of the exact means, to the rounding of
    fp32 additions."""
    steps = 12
    given = [local_gradients(rank, steps) for rank in range(size)]
    found = world(size).run(_steps, options, accumulate, steps)
    for total, carry, moved, number in found:
        assert number > 1
        assert moved == (not options.get("find_unused_parameters")), (
            "without a new layout this test shows less than it says"
        )
        for name, exact in given[0].items():
            mean = sum((g[name] for g in given), torch.zeros_like(exact)) / size
            torch.testing.assert_close(
                total[name] + carry[name], mean, rtol=0, atol=steps * size * 2.0**-24 * 8
            )
            assert carry[name].abs().max() > 1e-3
            assert torch.equal(total[name], found[0][0][name])


def _resume(rank: int, group: Any, path: str, saves: bool) -> dict[str, Tensor]:
    ddp, state = make(group)
    if saves:
        for step in range(4):
            ddp.zero_grad()
            loss_of(ddp, rank, step).backward()
        save(path, state.state_dict(), group=group)
        return carried(state, group)
    saved = load(path, group=group)[0]
    state.load_state_dict(saved)
    total = {name: torch.zeros_like(p).double() for name, p in ddp.module.named_parameters()}
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        for name, p in ddp.module.named_parameters():
            total[name] += p.grad.double()
    return {name: value + total[name] for name, value in carried(state, group).items()}


def test_errors_go_on_with_another_number_of_ranks(world, tmp_path):
    saved = world(3).run(_resume, str(tmp_path / "c"), True)[0]
    for size in (2, 3, 4):
        given = [local_gradients(rank, 3) for rank in range(size)]
        found = world(size).run(_resume, str(tmp_path / "c"), False)[0]
        for name, carry in saved.items():
            assert carry.abs().max() > 1e-3
            mean = sum((g[name] for g in given), torch.zeros_like(carry)) / size
            torch.testing.assert_close(found[name], mean + carry, rtol=0, atol=2e-6)


def _refuse(rank: int, group: Any) -> list[str]:
    told = []
    ddp, state = make(group)
    loss_of(ddp, rank, 0).backward()
    saved = state.state_dict()
    lacking = {**saved, "worker": {n: s for n, s in saved["worker"].items() if n != "c.bias"}}
    nameless, hook = ddp_hook(CODEC, group=group)
    for call in (
        lambda: state.load_state_dict({**saved, "codec": Int8().name}),
        lambda: state.load_state_dict(lacking),
        lambda: state.load_state_dict({}),
        lambda: nameless.state_dict(),
        lambda: ddp_hook("onebit"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        told.append(str(caught.value))
    other = DistributedDataParallel(Net(), process_group=group)
    other.register_comm_hook(nameless, hook)
    loss_of(other, rank, 0).backward()
    assert other.module.a.weight.grad.abs().max() > 0, "without names it trains"
    ddp, _ = make(group, codec=OneBit(block=64) if rank == 0 else Int8())
    with pytest.raises(Exception, match="other options") as caught:
        loss_of(ddp, rank, 0).backward()
    return told


def test_refuses(world):
    first, second = world(2).run(_refuse)
    assert first == second
    assert CODEC.name in first[0]
    assert Int8().name in first[0]
    assert "no errors for 'c.bias'" in first[1]
    assert "no communication state" in first[2]
    assert "use ddp_hook(codec, model=model)" in first[3]
    assert "codec is 'onebit'; expected a codec such as" in first[4]


def _alone(rank: int, group: Any) -> bool:
    ddp, state = make(group)
    loss_of(ddp, rank, 0).backward()
    exact = local_gradients(rank, 1)
    assert state.state_dict()["worker"] == {}
    return all(
        torch.equal(p.grad.double(), exact[name]) for name, p in ddp.module.named_parameters()
    )


def test_one_rank_alone_is_exact(world):
    assert world(1).run(_alone) == [True]
