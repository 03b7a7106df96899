"""ZeRO's step in one kernel over symmetric memory, compiled for the host: the bits of
reduce-scatter, Adam and all-gather one after the other.
"""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.optimizers.table import table_of
from pyops.ops.symmetric_step import symmetric_adam_from_table_reference
from tests.cuda.symmetric.test_kernel import BF16, FP16, FP32, addresses, bits, buffers
from tests.cuda.test_kernels import OPTIONS, around, place, pointer
from tests.grids import full

pytestmark = pytest.mark.cpu_only

DECOUPLED, MAXIMIZE, IN_FP32 = 1, 2, 4
SECOND = 1_000_000_000


class Ranks:
    """Parameters and gradients of every rank, and the state of each rank's shard.

    A shard has two rows, as of two parameters; the cuts between them, and between ranks where
    `odd`, keep no line.
    """

    def __init__(
        self,
        size: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
        *,
        numel: int = 15003,
        odd: bool = False,
    ) -> None:
        p, g, m, master = dtypes
        self.size, self.grad_dtype = size, g
        weights = buffers(1, numel, FP32)[0]
        self.params = [place(weights, p, shift=0) for _ in range(size)]
        self.grads = buffers(size, numel, g)
        step = 1 if odd else 64
        cuts = [min(numel, -(-numel * k // size // step) * step) for k in range(size)] + [numel]
        none, self.tables, self.rows, self.lists = torch.empty(0), [], [], []
        for a, b in itertools.pairwise(cuts):
            middle = a + (b - a) // 3
            lists: list[list[Tensor]] = [[] for _ in range(8)]
            for row, (c, d) in enumerate([(a, middle), (middle, b)]):
                shift = c % 8
                lists[2].append(place(weights[c:d] * 0.1, m, shift=shift))
                lists[3].append(place(weights[c:d].square() * 0.01, m, shift=shift))
                lists[4].append(none)
                lists[5].append(
                    none if master is None else place(weights[c:d], master, shift=shift)
                )
                lists[6].append(none)
                lists[7].append(torch.tensor(float(3 + row)))
            self.rows.append([(a, middle), (middle, b)])
            self.lists.append(lists)

    def table(self, rank: int, grads: Tensor) -> Tensor:
        lists = self.lists[rank]
        params = self.params[rank]
        lists[0] = [params[c:d] for c, d in self.rows[rank]]
        lists[1] = [grads[c:d] for c, d in self.rows[rank]]
        return table_of(lists, [0, 0])

    def state(self) -> list[Tensor]:
        kept = [t for lists in self.lists for column in lists[2:] for t in column if t.numel()]
        return [*self.params, *kept]


def one_after_the_other(
    kernels: ctypes.CDLL, ranks: Ranks, *, scale: float, flags: int, factor: Tensor
) -> None:
    """Reduce-scatter, the step of each shard, all-gather: by the plain kernels."""
    for rank in range(ranks.size):
        total = torch.empty_like(
            ranks.grads[0], dtype=FP32 if flags & IN_FP32 else ranks.grad_dtype
        )
        sum_rows_reference(total, ranks.grads, scale=scale)
        table = ranks.table(rank, total)
        kernels.emulated_step(
            3,
            0,
            pointer(table),
            2,
            None,
            0,
            pointer(factor),
            None,
            (ctypes.c_double * 5)(*OPTIONS.values()),
            flags & (DECOUPLED | MAXIMIZE),
            ctypes.c_uint64(0),
        )
    for rank in range(ranks.size):
        for c, d in ranks.rows[rank]:
            for params in ranks.params:
                params[c:d] = ranks.params[rank][c:d]


def at_once(
    symmetric: ctypes.CDLL,
    ranks: Ranks,
    *,
    scale: float,
    flags: int,
    factor: Tensor,
    found_inf: Tensor | None = None,
    timeout: float = 60.0,
    absent: int = 0,
    grid: int = 2,
) -> list[int]:
    """The kernel on all ranks; 1 + the lost rank, by rank."""
    size = ranks.size
    tables = [ranks.table(rank, ranks.grads[rank]) for rank in range(size)]
    pads = [
        torch.zeros(symmetric.emulated_pad_bytes() // 8, dtype=torch.int64) for _ in range(size)
    ]
    failures = torch.zeros(size, dtype=torch.int32)

    def shifts(of: list[Tensor]) -> ctypes.Array[ctypes.c_int64]:
        between = [there.data_ptr() - here.data_ptr() for here in of for there in of]
        assert all(shift % 16 == 0 for shift in between)
        return (ctypes.c_int64 * len(between))(*between)

    symmetric.emulated_symmetric_step(
        grid,
        size,
        addresses([tables]),
        (ctypes.c_int * size)(*[len(table) for table in tables]),
        addresses([pads]),
        shifts(ranks.grads),
        shifts(ranks.params),
        ctypes.c_double(scale),
        (ctypes.c_double * 5)(*OPTIONS.values()),
        flags,
        pointer(factor),
        pointer(found_inf),
        pointer(failures),
        ctypes.c_int64(int(timeout * SECOND)),
        absent,
    )
    return failures.tolist()


CASES = [
    (FP32, FP32, FP32, None),
    (BF16, BF16, FP32, FP32),
    (BF16, BF16, BF16, None),
    (FP16, FP16, FP32, FP32),
    (BF16, FP32, FP32, FP32),
]


@pytest.mark.parametrize("flags", [DECOUPLED, full(MAXIMIZE), IN_FP32])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtypes", CASES, ids=str)
@pytest.mark.parametrize("size", [2, 3, full(8)])
def test_the_step_has_the_bits_of_its_parts(symmetric, kernels, size, dtypes, odd, flags):
    factor = torch.tensor(0.7)
    expected, ranks = Ranks(size, dtypes, odd=odd), Ranks(size, dtypes, odd=odd)
    before = [t.clone() for t in ranks.grads]
    one_after_the_other(kernels, expected, scale=1 / size, flags=flags, factor=factor)
    assert at_once(symmetric, ranks, scale=1 / size, flags=flags, factor=factor) == [0] * size
    for got, want in zip(ranks.state(), expected.state(), strict=True):
        assert torch.equal(bits(got), bits(want))
        assert got.dim() == 0 or (around(got) == -77.0).all(), "written outside"
    assert not torch.equal(ranks.params[0], Ranks(size, dtypes).params[0]), "nothing was done"
    assert all(torch.equal(a, b) for a, b in zip(ranks.grads, before, strict=True))
    assert [float(lists[7][0]) for lists in ranks.lists] == [4.0] * size


def test_a_found_inf_changes_nothing(symmetric):
    ranks, before = Ranks(2, CASES[1]), Ranks(2, CASES[1])
    one = torch.ones(1)
    assert at_once(symmetric, ranks, scale=0.5, flags=1, factor=one, found_inf=one) == [0, 0]
    for got, want in zip(ranks.state(), before.state(), strict=True):
        assert torch.equal(got, want)


def test_without_a_rank_nothing_is_changed(symmetric):
    ranks, before = Ranks(3, CASES[1]), Ranks(3, CASES[1])
    lost = at_once(
        symmetric, ranks, scale=0.5, flags=1, factor=torch.ones(1), timeout=0.2, absent=1 << 1
    )
    assert lost == [2, 0, 2]
    for got, want in zip(ranks.state(), before.state(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("flags", [DECOUPLED, IN_FP32])
@pytest.mark.parametrize("dtypes", CASES[:2], ids=str)
def test_the_reference_is_what_the_kernel_does(symmetric, dtypes, flags):
    """Within the rounding of plain torch; rank by rank, for gradients that are there already."""
    size, factor = 3, torch.tensor(0.7)
    ranks, expected = Ranks(size, dtypes), Ranks(size, dtypes)
    assert at_once(symmetric, ranks, scale=1 / size, flags=flags, factor=factor) == [0] * size
    for rank in range(size):
        symmetric_adam_from_table_reference(
            expected.table(rank, expected.grads[rank]),
            expected.grads,
            expected.params,
            [torch.empty(0)] * size,
            torch.zeros(1, dtype=torch.int32),
            None,
            factor,
            None,
            rank=rank,
            ctas=2,
            scale=1 / size,
            in_fp32=bool(flags & IN_FP32),
            timeout_ns=1,
            decoupled=bool(flags & DECOUPLED),
            maximize=False,
            **OPTIONS,
        )
    for got, want in zip(ranks.state(), expected.state(), strict=True):
        close = {"rtol": 2 * torch.finfo(got.dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(got, want, **close)
