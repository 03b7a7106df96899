"""PowerSGD where it is used: DataParallel, torch's DDP, a checkpoint in the middle; a descent that
needs its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyops.checkpoint import load, save
from pyops.comm.buckets.ddp import ddp_hook
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.compressed import compressed_all_reduce, compressed_reduce_scatter
from pyops.comm.compression.eight_bit import Int8
from pyops.comm.compression.names import parse
from pyops.comm.compression.power_sgd import PowerSGD, PowerSGDMemory
from pyops.data_parallel import DataParallel
from pyops.flat import FlatLayout

CODEC = PowerSGD(2)
WIDTH = 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.b, self.a, self.c = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(10, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        for p in self.parameters():
            p.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(20, 10, generator=generator), torch.randn(20, WIDTH, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def exact_means(size: int, steps: range) -> dict[str, Tensor]:
    """The sum over the steps of the mean gradients, float64."""
    total: dict[str, Tensor] = {}
    for rank in range(size):
        net = Net()
        for step in steps:
            loss_of(net, rank, step).backward()
        for name, p in net.named_parameters():
            assert p.grad is not None
            total[name] = total.get(name, 0.0) + p.grad.double() / size
    return total


def accumulate(model: nn.Module, module: nn.Module, rank: int, steps: range) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p).double() for name, p in module.named_parameters()}
    for step in steps:
        model.zero_grad()
        loss_of(model, rank, step).backward()
        for name, p in module.named_parameters():
            assert p.grad is not None
            total[name] += p.grad.double()
    return total


def _data_parallel(rank: int, group: Any, path: str, first: bool) -> tuple[Any, ...]:
    def make() -> DataParallel:
        return DataParallel(Net(), group=group, codec=CODEC, bucket_bytes=4000)

    model, steps = make(), range(6) if first else range(6, 9)
    if not first:
        model.load_communication_state(load(path, group=group)[0])
    total = accumulate(model, model.module, rank, steps)
    if first:
        save(path, model.communication_state(), group=group)
        again = make()
        again.load_communication_state(load(path, group=group)[0])
        one, two = (accumulate(m, m.module, rank, range(6, 9)) for m in (model, again))
        assert all(torch.equal(one[name], two[name]) for name in one), (
            "resumed, it goes on as it would have"
        )
    saved = load(path, group=group)[0]
    rows = {n: s.tensor[0].double() for n, s in model.communication_state()["worker"].items()}
    return (
        total,
        {n: r.double().mean(dim=0) for n, r in saved["worker"].items()},
        rows,
        sorted(saved["basis"]),
    )


def test_data_parallel_saves_resumes_and_changes_its_number_of_ranks(world, tmp_path):
    found = world(2).run(_data_parallel, str(tmp_path / "c"), True)
    total, carried, _, matrices = found[0]
    assert matrices == ["a.weight", "b.weight", "c.weight"]
    assert all(torch.equal(total[name], found[1][0][name]) for name in total)
    for name, exact in exact_means(2, range(6)).items():
        torch.testing.assert_close(total[name] + carried[name], exact, rtol=0, atol=1e-5)
    assert carried["b.weight"].abs().max() > 1e-2
    found = world(3).run(_data_parallel, str(tmp_path / "c"), False)
    for name, exact in exact_means(3, range(6, 9)).items():
        left = sum(rows[name] for _, _, rows, _ in found) / 3
        torch.testing.assert_close(
            found[0][0][name] + left, exact + carried[name], rtol=0, atol=1e-5
        )
        assert torch.equal(found[0][0][name], found[2][0][name])


def _ddp(rank: int, group: Any, steps: int) -> tuple[Any, ...]:
    net = Net()
    state, hook = ddp_hook(CODEC, group=group, model=net)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.005)
    ddp.register_comm_hook(state, hook)
    total = accumulate(ddp, net, rank, range(1))
    before, directions = (
        sorted(state._memories),
        {n: q.clone() for n, q in state.state_dict()["basis"].items()},
    )
    state.memory(
        [net.b.weight, net.a.weight],
        communicator=Communicator.of(group),
        device=torch.device("cpu"),
    )
    kept = all(
        torch.equal(q, directions[n])
        for n, q in state.state_dict()["basis"].items()
        if n[0] in "ab"
    )
    rest = accumulate(ddp, net, rank, range(1, steps))
    rows = {n: s.tensor[0].double() for n, s in state.state_dict()["worker"].items()}
    return {n: total[n] + rest[n] for n in total}, rows, before != sorted(state._memories), kept


def test_ddp_keeps_errors_and_directions_when_buckets_change(world):
    found = world(2).run(_ddp, 8)
    for name, exact in exact_means(2, range(8)).items():
        left = sum(rows[name] for _, rows, _, _ in found) / 2
        torch.testing.assert_close(found[0][0][name] + left, exact, rtol=0, atol=1e-5)
        assert torch.equal(found[0][0][name], found[1][0][name])
    assert all(moved and kept for *_, moved, kept in found)


def _regression(rank: int, group: Any, forget: bool) -> float:
    """Least squares for a full matrix by rank-1 steps; the distance to the solution but for the row
    that is shaken."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 16, generator=generator)
    truth = torch.randn(16, 16, generator=generator)
    model = DataParallel(nn.Linear(16, 16, bias=False), group=group, codec=PowerSGD(1))
    nn.init.zeros_(model.module.weight)
    rows = slice(20 * rank, 20 * rank + 20)
    for step in range(300):
        model.zero_grad()
        shake = model.module.weight[0].sum() * (
            20.0 if step % 2 else -20.0
        )  # the strongest direction, and of no use
        ((model(x[rows]) - x[rows] @ truth.t()).square().sum() / 20 + shake).backward()
        with torch.no_grad():
            model.module.weight -= 0.02 * model.module.weight.grad
        if forget:
            model.reducer.errors[0].worker.zero_()
    return float((model.module.weight.detach() - truth)[1:].norm() / truth[1:].norm())


@pytest.mark.full  # what is left is held by test_error_feedback
def test_descent_gets_there_only_with_its_errors(world):
    with_errors, without = (world(2).run(_regression, forget) for forget in (False, True))
    assert with_errors[0] == with_errors[1]
    assert with_errors[0] < 0.3 * without[0], (with_errors, without)


def test_refuses():
    x, layout = torch.zeros(400), FlatLayout.plan([("w", (20, 20))])
    with pytest.raises(
        ValueError, match="needs the shapes of the tensors; pass error=PowerSGDMemory"
    ):
        compressed_all_reduce(x, codec=CODEC)
    memory = PowerSGDMemory(layout, codec=PowerSGD(3), rank=0, size=1)
    with pytest.raises(
        ValueError, match=r"power_sgd\(rank=3, seed=0\).*this call has 400 with power_sgd\(rank=2"
    ):
        compressed_all_reduce(x, codec=CODEC, error=memory)
    with pytest.raises(ValueError, match="writes whole matrices, not pieces"):
        compressed_reduce_scatter(x, codec=CODEC)
    state = PowerSGDMemory(layout, codec=CODEC, rank=0, size=1).state_dict()
    for bad, message in [
        ({**state, "codec": Int8().name}, "int8.*power_sgd"),
        ({**state, "basis": {}}, r"directions for 'w' are none; expected \(2, 20\)"),
        ({**state, "worker": {}}, "no errors of 'w'"),
    ]:
        with pytest.raises(ValueError, match=message):
            PowerSGDMemory(layout, codec=CODEC, rank=0, size=1).load_state_dict(bad)
    assert parse("power_sgd") == PowerSGD()
