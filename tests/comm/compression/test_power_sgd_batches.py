"""PowerSGD takes matrices of one shape as a batch, through strided views: each comes out as it
would by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.comm.collectives import two_shot
from pyops.comm.collectives.transport import Transport, run_virtual
from pyops.comm.compression.power_sgd import PowerSGD, PowerSGDMemory, low_rank, low_rank_mean
from pyops.comm.compression.power_sgd.low_rank import Family, families, pieces, whole_batches
from pyops.flat import FlatLayout
from tests.comm.compression.test_power_sgd import gradients, reference

MATRIX = (24, 16)
# Three at even distances, a lone one of another shape among them, then three more after an odd gap.
NAMED = [
    ("a0", MATRIX),
    ("v0", (5,)),
    ("a1", MATRIX),
    ("v1", (5,)),
    ("a2", MATRIX),
    ("w", (20, 30)),
    ("a3", MATRIX),
    ("v2", (3,)),
    ("v3", (2,)),
    ("a4", MATRIX),
    ("v4", (1,)),
    ("a5", MATRIX),
]
MATRICES = [name for name, shape in NAMED if len(shape) == 2]
STEPS = 4
LAYOUTS = {alignment: FlatLayout.plan(NAMED, alignment=alignment) for alignment in (1, 64)}


@pytest.mark.parametrize("alignment", LAYOUTS)
@pytest.mark.parametrize(("rank", "factor"), [(1, 1.0), (1, 3.0), (2, 1.0), (4, 3.0)])
@pytest.mark.parametrize(
    "band", [40, 800, 1 << 16], ids=["rows of a matrix", "some matrices", "all matrices"]
)
def test_each_matrix_of_a_batch_follows_the_paper(
    alignment: int, rank: int, factor: float, band: int, monkeypatch: Any
):
    """Two ranks, the flat tensor a part of a larger one, against float64; the surroundings and the
    padding stay as they are."""
    monkeypatch.setattr(low_rank, "BAND", band)
    layout, size = LAYOUTS[alignment], 2
    expected, errors = reference(size, STEPS, rank, layout=layout, compressed=MATRICES)

    def body(transport: Transport) -> Any:
        memory = PowerSGDMemory(layout, codec=PowerSGD(rank), rank=transport.rank, size=size)
        outs = torch.full((STEPS, 7 + layout.numel + 9), 5.0)

        def exchange(x: Tensor) -> None:
            two_shot.all_reduce(x, transport=transport, segment=64, scale=1.0 / size)

        for out, given in zip(outs, gradients(transport.rank, STEPS, layout), strict=True):
            low_rank_mean(out[7:-9].copy_(given), memory, exchange=exchange, factor=factor)
        assert outs[:, :7].eq(5.0).all()
        assert outs[:, -9:].eq(5.0).all()
        return outs[:, 7:-9], memory

    found = run_virtual(size, body)
    for number, (outs, memory) in enumerate(found):
        torch.testing.assert_close(outs.double() / factor, expected, rtol=2e-4, atol=5e-5)
        torch.testing.assert_close(memory.worker.double(), errors[number], rtol=2e-4, atol=5e-5)
        assert torch.equal(outs, found[0][0]), "every rank has the same bits"
        assert memory.worker.abs().max() > 0.1
        assert all(torch.equal(a, b) for a, b in zip(memory.bases, found[0][1].bases, strict=True))


def test_one_matrix_of_a_batch_that_is_not_finite_leaves_the_others_as_they_are():
    layout = LAYOUTS[1]
    rows = gradients(0, 2, layout)
    found = []
    for bad in (False, True):
        memory = PowerSGDMemory(layout, codec=PowerSGD(1), rank=0, size=1)
        flat = rows.clone()
        low_rank_mean(flat[0], memory, exchange=lambda x: None)
        before = {name: q.clone() for name, q in memory.state_dict()["basis"].items()}
        error = memory.worker.clone()
        if bad:
            flat[1, layout.slice("a1").start + 3] = torch.inf
        low_rank_mean(flat[1], memory, exchange=lambda x: None)
        assert memory.overflowed.item() == bad
        found.append((flat[1], memory))
    (clean, good), (ruined, memory) = found
    place = layout.slice("a1")
    assert ruined[place].isnan().all()
    assert torch.equal(memory.worker[place], error[place])
    assert torch.equal(memory.state_dict()["basis"]["a1"], before["a1"])
    for name in set(layout.names) - {"a1"}:
        assert torch.equal(ruined[layout.slice(name)], clean[layout.slice(name)])
        assert torch.equal(memory.worker[layout.slice(name)], good.worker[layout.slice(name)])
    assert all(
        torch.equal(memory.state_dict()["basis"][n], good.state_dict()["basis"][n])
        for n in before
        if n != "a1"
    )


def test_a_sum_that_overflows_after_the_first_exchange_leaves_error_and_directions():
    """P is made of ones, so it is finite; the second column of Q is not."""
    layout = FlatLayout.plan([("a", MATRIX)], alignment=1)
    memory = PowerSGDMemory(layout, codec=PowerSGD(2), rank=0, size=1)
    basis = torch.zeros(1, 2, 16)
    basis[0, 0, 0], basis[0, 1, 2] = 1.0, 1.0
    memory.bases = [basis.clone()]
    gradient = torch.zeros(MATRIX)
    gradient[:, 0], gradient[:, 1], gradient[3, 2] = 1.0, 3e38, 1.0
    flat = gradient.flatten()
    low_rank_mean(flat, memory, exchange=lambda x: None)
    assert flat.isnan().all()
    assert memory.overflowed.item() == 1
    assert not memory.worker.any()
    assert torch.equal(memory.bases[0], basis)


def test_batches_and_pieces(monkeypatch: Any):
    """Stretches of even distances; pieces that cover every row of every matrix once."""
    layout = LAYOUTS[1]
    found, _ = families(layout, rank=1)
    family = next(f for f in found if f.rows == 24)
    numel = 24 * 16
    batches = whole_batches(layout, family)
    assert [(b.first, b.count, b.distance) for b in batches] == [
        (0, 3, numel + 5),
        (3, 2, numel + 5),
        (5, 1, 0),
    ]
    for band in (40, 800, 1 << 16):
        monkeypatch.setattr(low_rank, "BAND", band)
        seen = torch.zeros(len(family.members), family.rows)
        for piece in (piece for batch in batches for piece in pieces(batch)):
            seen[piece.first : piece.first + piece.count, piece.row : piece.row + piece.rows] += 1
            assert piece.numel <= max(band, family.columns)
        assert seen.eq(1).all()
    assert whole_batches(layout, Family(20, 30, 1, (layout.names.index("w"),)))[0].count == 1
