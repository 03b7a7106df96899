"""PowerSGD: algorithm 2 of the paper step by step in float64, nothing lost, the same bits on every
rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.comm.collectives import two_shot
from pyops.comm.collectives.transport import Transport, run_virtual
from pyops.comm.compression.power_sgd import PowerSGD, PowerSGDMemory, low_rank_mean
from pyops.comm.compression.power_sgd.low_rank import (
    Family,
    families,
    orthonormal,
    product,
    sum_last,
    unit_columns,
)
from pyops.flat import FlatLayout

LAYOUT = FlatLayout.plan(
    [
        ("a", (24, 16)),
        ("bias", (5,)),
        ("conv", (24, 4, 4)),
        ("small", (3, 2)),
        ("b", (10, 31)),
        ("none", (0,)),
    ]
)
COMPRESSED = ("a", "conv", "b")


def gradients(rank: int, steps: int, layout: FlatLayout = LAYOUT) -> Tensor:
    """[steps, numel] for one rank: zero in the padding, a common part, so that there is something
    to find."""
    common, own = torch.Generator().manual_seed(100), torch.Generator().manual_seed(rank)
    rows = torch.zeros(steps, layout.numel)
    for name in layout.names:
        place = layout.slice(name)
        fixed = torch.randn(rows[:, place].shape[1], generator=common)
        rows[:, place] = fixed + 0.5 * torch.randn(rows[:, place].shape, generator=own)
    return rows


def train(
    transport: Transport, memory: PowerSGDMemory, rows: Tensor, *, factor: float = 1.0
) -> Tensor:
    def exchange(x: Tensor) -> None:
        two_shot.all_reduce(x, transport=transport, segment=64, scale=1.0 / transport.size)

    outs = rows.clone()
    for out in outs:
        low_rank_mean(out, memory, exchange=exchange, factor=factor)
    return outs


def run(
    size: int, steps: int, *, rank: int = 2, drop_errors: bool = False, factor: float = 1.0
) -> list[tuple[Tensor, Any]]:
    def body(transport: Transport) -> tuple[Tensor, Any]:
        memory = PowerSGDMemory(LAYOUT, codec=PowerSGD(rank), rank=transport.rank, size=size)
        rows = gradients(transport.rank, steps)
        if not drop_errors:
            return train(transport, memory, rows, factor=factor), memory
        outs = []
        for row in rows.split(1):
            outs.append(train(transport, memory, row, factor=factor))
            memory.worker.zero_()
        return torch.cat(outs), memory

    return run_virtual(size, body)


def reference(
    size: int,
    steps: int,
    rank: int,
    *,
    layout: FlatLayout = LAYOUT,
    compressed: Sequence[str] = COMPRESSED,
) -> tuple[Tensor, Tensor]:
    """(out [steps, numel], worker errors [size, numel]) of algorithm 2 in float64, with QR for the
    orthogonal columns."""
    b = torch.stack([gradients(r, steps, layout) for r in range(size)]).double()
    start = PowerSGDMemory(layout, codec=PowerSGD(rank), rank=0, size=size).state_dict()["basis"]
    out, errors = b.mean(dim=0), torch.zeros(size, layout.numel, dtype=torch.float64)
    for name in compressed:
        place, n = layout.slice(name), layout.shapes[layout.names.index(name)][0]
        q, e = start[name].double().t(), torch.zeros_like(b[:, 0, place]).view(size, n, -1)
        for step in range(steps):
            u = b[:, step, place].view(size, n, -1) + e
            p = torch.linalg.qr(u.mean(dim=0) @ q).Q
            q = u.mean(dim=0).t() @ p
            e = u - p @ q.t()
            out[step, place] = (p @ q.t()).flatten()
            q = q / q.norm(dim=0)
        errors[:, place] = e.view(size, -1)
    return out, errors


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_follows_the_paper(size: int):
    expected, errors = reference(size, 6, 2)
    found = run(size, 6)
    assert (
        expected[-1] - torch.stack([gradients(r, 6) for r in range(size)]).double().mean(0)[-1]
    ).abs().max() > 0.1, "it compresses"
    for rank, (outs, memory) in enumerate(found):
        torch.testing.assert_close(outs.double(), expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(memory.worker.double(), errors[rank], rtol=2e-4, atol=5e-5)
        assert torch.equal(outs, found[0][0]), "every rank has the same bits"
        assert all(
            torch.equal(mine, first)
            for mine, first in zip(memory.bases, found[0][1].bases, strict=True)
        )


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_nothing_is_lost(factor: float):
    """sum of out over the steps = factor * (sum of the mean gradients - mean of the last errors),
    to rounding."""
    steps, size = 30, 3
    found = run(size, steps, factor=factor)
    came = found[0][0].double().sum(dim=0) / factor
    given = torch.stack([gradients(r, steps) for r in range(size)]).double().mean(dim=0).sum(dim=0)
    left = torch.stack([memory.worker for _, memory in found]).double().mean(dim=0)
    assert left.abs().max() > 0.5
    torch.testing.assert_close(came + left, given, rtol=0, atol=steps * 30 * 2.0**-24)
    dropped = run(size, steps, factor=factor, drop_errors=True)[0][0].double().sum(dim=0) / factor
    assert (dropped + left - given).abs().max() > 1.0, "without errors the sum would be another"


def test_what_is_small_is_exact():
    size = 3
    found = run(size, 4)
    mean = torch.stack([gradients(r, 4) for r in range(size)]).double().mean(dim=0).float()
    for name in ("bias", "small"):
        torch.testing.assert_close(
            found[0][0][:, LAYOUT.slice(name)], mean[:, LAYOUT.slice(name)], rtol=1e-6, atol=1e-6
        )
        assert found[0][1].worker[LAYOUT.slice(name)].abs().max() == 0
    padding = torch.ones(LAYOUT.numel, dtype=torch.bool)
    for name in LAYOUT.names:
        padding[LAYOUT.slice(name)] = False
    assert found[0][0][:, padding].abs().max() == 0
    assert found[0][1].worker[padding].abs().max() == 0


def test_a_matrix_of_low_rank_is_found_exactly():
    low = torch.randn(24, 2, generator=torch.Generator().manual_seed(1)) @ torch.randn(2, 16)
    flat = torch.zeros(LAYOUT.numel)
    flat[LAYOUT.slice("a")] = low.flatten()
    memory = PowerSGDMemory(LAYOUT, codec=PowerSGD(3), rank=0, size=1)
    low_rank_mean(flat, memory, exchange=lambda x: None)
    torch.testing.assert_close(flat[LAYOUT.slice("a")].view(24, 16), low, rtol=1e-5, atol=1e-5)


def test_directions_come_back_after_a_gradient_of_zero():
    memory = PowerSGDMemory(LAYOUT, codec=PowerSGD(2), rank=0, size=1)
    row = gradients(0, 1)[0]
    for scale in (0.0, 0.0, 1.0):
        flat = row * scale
        low_rank_mean(flat, memory, exchange=lambda x: None)
    part = flat[LAYOUT.slice("a")].view(24, 16)
    assert torch.linalg.matrix_rank(part, rtol=1e-5) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_out_of_errors_and_directions(bad: float):
    size, steps = 2, 2

    def body(transport: Transport) -> Any:
        memory = PowerSGDMemory(LAYOUT, codec=PowerSGD(2), rank=transport.rank, size=size)
        rows = gradients(transport.rank, steps)
        train(transport, memory, rows[:1])
        worker, bases = memory.worker.clone(), [b.clone() for b in memory.bases]
        assert memory.overflowed.item() == 0
        if transport.rank == 1:
            rows[1, LAYOUT.slice("conv").start + 3] = bad
        out = train(transport, memory, rows[1:])[0]
        return out, worker, bases, memory

    for out, worker, bases, memory in run_virtual(size, body):
        place = LAYOUT.slice("conv")
        assert memory.overflowed.item() == 1
        assert out[place].isnan().all()
        assert torch.equal(memory.worker[place], worker[place])
        assert memory.worker.isfinite().all()
        assert all(b.isfinite().all() for b in memory.bases)
        family, member = next(
            (i, f.members.index(2)) for i, f in enumerate(memory.families) if 2 in f.members
        )
        assert torch.equal(memory.bases[family][member], bases[family][member])
        assert out[LAYOUT.slice("a")].isfinite().all(), "a matrix is alone in its ruin"
        assert not torch.equal(memory.worker[LAYOUT.slice("a")], worker[LAYOUT.slice("a")])


def test_columns():
    torch.manual_seed(0)
    p = torch.randn(3, 4, 101)
    p[1, 2], p[2] = 2 * p[1, 0] + p[1, 1], 0
    found = orthonormal(p)
    gram = found.double() @ found.double().transpose(1, 2)
    expected = torch.stack(
        [torch.eye(4), torch.diag(torch.tensor([1.0, 1, 0, 1])), torch.zeros(4, 4)]
    ).double()
    torch.testing.assert_close(gram, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        found[0].double().t() @ (found[0].double() @ p[0].t().double()),
        p[0].t().double(),
        atol=1e-5,
        rtol=0,
    )
    q = torch.randn(3, 4, 7)
    torch.testing.assert_close(product(found, q), found.transpose(1, 2) @ q, rtol=1e-5, atol=1e-6)
    q[0, 1] = 0
    unit = unit_columns(q, fresh=torch.full_like(q, 2.0))
    torch.testing.assert_close(unit[1], q[1] / q[1].norm(dim=1, keepdim=True))
    assert torch.equal(unit[0, 1], torch.full((7,), 2.0))


def _bits_with_threads(threads: int) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        p, q, long = (
            torch.randn(1, 4, 70_001),
            torch.randn(1, 4, 9),
            torch.randn(1, 1_000_003, dtype=torch.float64),
        )
        p = orthonormal(p)
        results = [p, product(p, q), unit_columns(p, fresh=p), sum_last(long)]
        return torch.cat([x.double().flatten() for x in results])
    finally:
        torch.set_num_threads(before)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    assert torch.equal(_bits_with_threads(1), _bits_with_threads(2))


def test_families():
    found, whole = families(LAYOUT, rank=2)
    assert found == [Family(24, 16, 2, (0, 2)), Family(10, 31, 2, (4,))]
    assert whole == [1, 3, 5]
    assert families(LAYOUT, rank=100)[0] == [], "what would not shrink by half"
    with pytest.raises(ValueError, match="rank is 0"):
        PowerSGD(0)
