"""DataParallel(codec=...): what a bucket loses comes with the next step, parameter by parameter,
and nothing else changes."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.checkpoint import load, save
from pyops.comm.buckets import reducer
from pyops.comm.compression.eight_bit import Int8
from pyops.comm.compression.one_bit import OneBit
from pyops.data_parallel import DataParallel
from pyops.flat import Shard
from tests.grids import full

pytestmark = pytest.mark.on_device

WIDTH = 20
CODEC = OneBit(block=64)


class Net(nn.Module):
    """More than a bucket, sizes that leave padding, and layers that are used sometimes or never."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(WIDTH, 7)
        for p in self.parameters():
            p.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor, *, sometimes: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.sometimes(x) if sometimes else x)


def loss_of(model: nn.Module, rank: int, step: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(6, WIDTH, generator=generator), torch.randn(6, 7, generator=generator)
    return nn.functional.mse_loss(model(x, **options), y)


def local_gradients(rank: int, steps: int) -> dict[str, Tensor]:
    """Sum over the steps, in float64, of this rank's gradients."""
    net, total = Net(), {name: torch.zeros_like(p).double() for name, p in Net().named_parameters()}
    for step in range(steps):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        for name, p in net.named_parameters():
            total[name] += 0.0 if p.grad is None else p.grad.double()
    return total


def whole(group: Any, shards: dict[str, Shard]) -> dict[str, Tensor]:
    """The tensors that all ranks' shards make, in float64."""
    found: dict[str, Tensor] = {}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        gathered,
        {n: (s.global_shape, s.offset, s.tensor.clone()) for n, s in shards.items()},
        group=group,
    )
    for part in gathered:
        for name, (shape, offset, tensor) in part.items():
            place = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            found.setdefault(name, torch.full(shape, torch.nan).double())[place] = tensor.double()
    return found


def carried(model: DataParallel, group: Any, op: str) -> dict[str, Tensor]:
    """By parameter: what the errors of all ranks will still add to the reduced gradients."""
    state = model.communication_state()
    worker, server = whole(group, state["worker"]), whole(group, state["server"])
    total = {
        name: rows.mean(dim=0) if op == "mean" else rows.sum(dim=0) for name, rows in worker.items()
    }
    return {
        name: rows + server[name].view(rows.shape) if name in server else rows
        for name, rows in total.items()
    }


def gradients(model: DataParallel) -> dict[str, Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.module.named_parameters()
    }


def _steps(
    rank: int, group: Any, op: str, bucket_bytes: int, accumulate: bool, steps: int
) -> tuple[Any, ...]:
    model = DataParallel(Net(), group=group, codec=CODEC, reduction=op, bucket_bytes=bucket_bytes)
    total: dict[str, Tensor] = {
        name: torch.zeros_like(p).double() for name, p in model.module.named_parameters()
    }
    for step in range(steps):
        last = not accumulate or step % 2 == 1
        if not accumulate or step % 2 == 0:
            model.zero_grad()
        with contextlib.nullcontext() if last else model.no_sync():
            loss_of(model, rank, step).backward()
        if last:
            for name, gradient in gradients(model).items():
                total[name] += gradient.double()
    buffer = model.flat[0]
    padding = torch.ones(buffer.layout.numel, dtype=torch.bool)
    for name in buffer.layout.names:
        padding[buffer.layout.slice(name)] = False
    assert padding.sum() > 0
    assert buffer.grad[padding].abs().max() == 0, (
        "padding has a gradient of zero, or it would enter norms and updates"
    )
    errors = model.reducer.errors
    assert errors is not None
    assert all(
        errors[i].worker[places].abs().sum() == 0 for i, places in enumerate(errors._padding)
    ), "nor an error"
    return (
        total,
        carried(model, group, op),
        gradients(model),
        model.module.never.weight.grad is None,
    )


@pytest.mark.parametrize(
    ("size", "op", "bucket_bytes", "accumulate"),
    [
        (2, "mean", 1 << 20, False),
        full(3, "mean", 600, False),
        (4, "sum", 600, True),
        full(2, "sum", 600, False),
        (3, "mean", 1 << 20, True),
    ],
)
def test_nothing_is_lost(world, size: int, op: str, bucket_bytes: int, accumulate: bool):
    """Sum of the reduced gradients + what the errors carry = sum of the exact ones, to the rounding
    of fp32 additions."""
    steps = 16
    given = [local_gradients(rank, steps) for rank in range(size)]
    found = world(size).run(_steps, op, bucket_bytes, accumulate, steps)
    for name, first in found[0][0].items():
        exact = sum(g[name] for g in given) / (size if op == "mean" else 1)
        carry = found[0][1][name]
        if name.startswith("never"):
            assert first.abs().max() == carry.abs().max() == 0
            continue
        scale = steps * size * 2.0**-24 * 4 * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(first + carry, exact, rtol=0, atol=scale)
        assert carry.abs().max() > 100 * scale, "so small an error would not be missed"
        assert all(torch.equal(first, other[0][name]) for other in found), "the ranks differ"
    assert all(never for *_, never in found), (
        "a parameter used on no rank keeps its gradient of None"
    )


def _one_rank_uses_it(rank: int, group: Any) -> list[Any]:
    model = DataParallel(Net(), group=group, codec=CODEC, bucket_bytes=600)
    for step in range(2):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    before, held = carried(model, group, "mean"), gradients(model)
    loss_of(model, rank, 2, sometimes=False).backward()  # on no rank
    middle, kept = carried(model, group, "mean"), gradients(model)
    model.zero_grad()
    loss_of(model, rank, 3, sometimes=rank == 1).backward()
    return [before, held, middle, kept, carried(model, group, "mean"), gradients(model)]


def test_a_parameter_used_on_no_rank_keeps_its_errors(world):
    size = 3
    net = Net()
    loss_of(net, 1, 3).backward()
    for before, held, middle, kept, after, reduced in world(size).run(_one_rank_uses_it):
        for name in ("sometimes.weight", "sometimes.bias"):
            assert before[name].abs().max() > 0
            assert torch.equal(before[name], middle[name]), (
                "what was sent of it was thrown away, so nothing has left the errors"
            )
            assert torch.equal(held[name], kept[name])
            exact = (
                dict(net.named_parameters())[name].grad.double() / size
            )  # rank 1's; the others have none
            torch.testing.assert_close(
                reduced[name] + after[name], exact + middle[name], rtol=0, atol=1e-6
            )
        assert not torch.equal(before["first.weight"], middle["first.weight"])


def _resume(rank: int, group: Any, path: str, bucket_bytes: int) -> list[bool]:
    model = DataParallel(Net(), group=group, codec=CODEC, bucket_bytes=600)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    save(path, {"communication": model.communication_state()}, group=group)
    expected = carried(model, group, "mean")
    again = DataParallel(Net(), group=group, codec=CODEC, bucket_bytes=bucket_bytes)
    again.load_communication_state(load(path, group=group)[0]["communication"])
    same = [
        torch.equal(value, expected[name]) for name, value in carried(again, group, "mean").items()
    ]
    for m in (model, again):
        m.zero_grad()
        loss_of(m, rank, 3).backward()
    return [
        all(same),
        all(
            torch.equal(a, b)
            for a, b in zip(gradients(model).values(), gradients(again).values(), strict=True)
        ),
    ]


def test_resumes_where_it_was(world, tmp_path):
    assert world(3).run(_resume, str(tmp_path / "c"), 600) == [[True, True]] * 3
    assert all(errors for errors, _ in world(2).run(_resume, str(tmp_path / "c"), 1 << 20)), (
        "in other buckets, the same errors"
    )


def _save_or_load(rank: int, group: Any, path: str, op: str, saves: bool) -> dict[str, Tensor]:
    model = DataParallel(
        Net(), group=group, codec=CODEC, bucket_bytes=600 if saves else 2000, reduction=op
    )
    if saves:
        for step in range(3):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        save(path, model.communication_state(), group=group)
    else:
        model.load_communication_state(load(path, group=group)[0])
    return carried(model, group, op)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_another_number_of_ranks_carries_the_same(world, tmp_path, op: str):
    expected = world(3).run(_save_or_load, str(tmp_path / "c"), op, True)[0]
    for size in (2, 4):
        for found in world(size).run(_save_or_load, str(tmp_path / "c"), op, False):
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[name], value, rtol=0, atol=2.0**-22
                )  # roundings of numbers below 2
    assert max(v.abs().max() for v in expected.values()) > 1e-3


def _overlap(rank: int, group: Any) -> tuple[int, int]:
    model = DataParallel(Net(), group=group, codec=CODEC, bucket_bytes=600)
    at_last_gradient = []
    with mock.patch.object(
        reducer, "compressed_all_reduce", wraps=reducer.compressed_all_reduce
    ) as reduce:
        model.module.first.weight.register_post_accumulate_grad_hook(
            lambda p: at_last_gradient.append(reduce.call_count)
        )
        model.module.never.requires_grad_(False)
        loss_of(model, rank, 0).backward()
        assert all(call.kwargs["async_op"] for call in reduce.call_args_list)
        return at_last_gradient[0], reduce.call_count


def test_the_first_buckets_leave_while_backward_runs(world):
    for early, all_buckets in world(2).run(_overlap):
        assert 0 < early < all_buckets


def _regression(rank: int, group: Any, forget: bool) -> float:
    """Least squares with features of very different sizes, by gradient descent; the final distance
    to the solution."""
    size = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(32, 12, generator=generator) * torch.logspace(0, -0.5, 12)
    truth = torch.randn(12, generator=generator)
    b = a @ truth
    model = DataParallel(nn.Linear(12, 1, bias=False), group=group, codec=CODEC, reduction="mean")
    nn.init.zeros_(model.module.weight)
    rows = slice(rank * 32 // size, (rank + 1) * 32 // size)
    for step in range(800):
        model.zero_grad()
        (model(a[rows])[:, 0] - b[rows]).square().mean().backward()
        with torch.no_grad():
            model.module.weight -= 0.2 * 0.994**step * model.module.weight.grad
        if forget:
            model.reducer.errors[0].zero_()
    return float((a @ model.module.weight[0].detach() - b).norm() / b.norm())


@pytest.mark.full
def test_gradient_descent_gets_there_only_with_its_errors(world):
    with_errors, without = (world(2).run(_regression, forget) for forget in (False, True))
    assert with_errors[0] == with_errors[1], "the ranks' weights differ"
    assert with_errors[0] < 1e-2
    assert without[0] > 10 * with_errors[0], (with_errors, without)


def _refuse(rank: int, group: Any) -> list[str]:
    told = []
    for codecs in ([CODEC, Int8()], [None, CODEC], [CODEC, "onebit"]):
        with pytest.raises((ValueError, TypeError)) as caught:
            DataParallel(Net(), group=group, codec=codecs[rank])
        told.append(str(caught.value))
    with pytest.raises(TypeError) as wrong:
        DataParallel(Net().double(), group=group, codec=CODEC)
    told.append(str(wrong.value))
    model = DataParallel(Net(), group=group, codec=CODEC)
    loss_of(model, rank, 0).backward()
    state, before = model.communication_state(), carried(model, group, "mean")
    lacking = {**state, "worker": {n: s for n, s in state["worker"].items() if n != "last.bias"}}
    for bad in ({**state, "codec": Int8().name}, lacking, {}, state if rank == 0 else lacking):
        with pytest.raises(ValueError) as refused:
            model.load_communication_state(bad)
        told.append(str(refused.value))
    after = carried(model, group, "mean")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return told


def test_refuses_alike_on_every_rank(world):
    first, second = world(2).run(_refuse)
    assert first == second
    assert "rank 0 and rank 1 reduce gradients in different ways" in first[0]
    assert "and codec on every rank" in first[1]
    assert "codec is 'onebit'; expected a codec such as" in first[2]
    assert "float64, which" in first[3]
    assert CODEC.name in first[4]
    assert Int8().name in first[4]
    assert "no errors for 'last.bias'" in first[5]
    assert "no communication state" in first[6]
    assert "no errors for 'last.bias'" in first[7]


def test_one_rank_alone_is_exact():
    model, net = DataParallel(Net(), codec=CODEC), Net()
    for m in (model, net):
        loss_of(m, 0, 0).backward()
    assert torch.equal(model.module.first.weight.grad, net.first.weight.grad)
    assert model.communication_state() == {}
    model.load_communication_state(
        {"codec": CODEC.name, "worker": {}}
    )  # of several ranks: one alone has no use for it


def test_a_state_and_no_codec():
    model = DataParallel(Net())
    model.load_communication_state({})
    with pytest.raises(ValueError, match=r"of codec onebit\(.*this run uses none"):
        model.load_communication_state({"codec": CODEC.name, "worker": {}})
