"""The kernel over symmetric memory, compiled for the host: n ranks are n buffers of one process,
and their CTAs run at once. Its bits are those of two shots on the CPU.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from pyops.comm.collectives import two_shot
from pyops.comm.collectives.transport import run_virtual
from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.optimizers.grad_norm import squared_norm_reference
from tests.cuda.test_kernels import CODES, around, place, pointer
from tests.grids import cut, full

pytestmark = pytest.mark.cpu_only

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SECOND = 1_000_000_000


def addresses(rows: Sequence[Sequence[Tensor | None]]) -> ctypes.Array[ctypes.c_void_p]:
    flat = [None if t is None else t.data_ptr() for row in rows for t in row]
    return (ctypes.c_void_p * len(flat))(*flat)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


@dataclass
class Group:
    """What the ranks of a group keep from launch to launch."""

    kernels: ctypes.CDLL
    size: int
    pads: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        nbytes = self.kernels.emulated_pad_bytes()
        self.pads = [torch.zeros(nbytes // 8, dtype=torch.int64) for _ in range(self.size)]
        self.failures = torch.zeros(self.size, dtype=torch.int32)
        self.norms = torch.full((self.size, 2), -1.0, dtype=FP64)

    def run(
        self,
        rows: list[list[Tensor]],
        outs: list[list[Tensor]],
        wholes: list[Tensor],
        *,
        scale: float = 1.0,
        grid: int = 2,
        times: int = 1,
        norm: bool = False,
        in_line: bool = True,
        timeout: float = 60.0,
        absent: Sequence[int] = (),
    ) -> None:
        """Every rank's launch: `rows[r]` and `outs[r]` are what rank r reads and writes."""
        padded = [[*of, *[None] * (self.size - len(of))] for of in outs]
        heads = []
        for mine, theirs in zip(rows, outs, strict=True):
            pack = 16 // max(t.element_size() for t in (*mine, *theirs))
            at = {t.data_ptr() // t.element_size() % pack for t in (*mine, *theirs) if t.numel()}
            assert len(at) <= 1 or not in_line, "out of line with one another"
            heads.append(-min(at, default=0) % pack if in_line else -1)
        self.kernels.emulated_symmetric(
            grid,
            self.size,
            times,
            addresses(rows),
            addresses(padded),
            addresses([self.pads]),
            (ctypes.c_int64 * self.size)(*[mine[0].numel() for mine in rows]),
            (ctypes.c_int * self.size)(*heads),
            ctypes.c_double(scale),
            CODES[outs[0][0].dtype],
            CODES[rows[0][0].dtype],
            pointer(self.norms if norm else None),
            addresses([wholes]),
            (ctypes.c_int64 * self.size)(*[t.numel() for t in wholes]),
            pointer(self.failures),
            ctypes.c_int64(int(timeout * SECOND)),
            sum(1 << rank for rank in absent),
        )


def buffers(size: int, numel: int, dtype: torch.dtype, *, shift: int = 0) -> list[Tensor]:
    """One rank's values each: of both signs and many magnitudes, so that the order of the sum
    shows."""
    torch.manual_seed(size * 1000 + numel)
    values = [
        torch.randn(numel) * 2.0 ** torch.randint(-6, 7, (numel,)).float() for _ in range(size)
    ]
    return [place(x, dtype, shift=shift) for x in values]


def parts_of(buffer: Tensor, size: int) -> list[Tensor]:
    """Each rank's part, cut at multiples of 64 elements."""
    each = -(-buffer.numel() // size // 64) * 64 or 64
    cuts = [min(buffer.numel(), p * each) for p in range(size)] + [buffer.numel()]
    return [buffer[a:b] for a, b in itertools.pairwise(cuts)]


def of_two_shot(inputs: list[Tensor], *, scale: float) -> Tensor:
    """What two shots on the CPU give, over threads that play ranks."""

    def body(transport):
        x = inputs[transport.rank].clone()
        two_shot.all_reduce(x, transport=transport, segment=1024, scale=scale)
        return x

    return run_virtual(len(inputs), body)[0]


TWO_SHOTS = [
    (size, dtype, op)
    for size in (2, 3, 4, 5, 6, 7, 8)
    for dtype in (FP32, BF16, FP16)
    for op in ("sum", "mean")
]
# The fewest ranks, the most, and some that share nothing out evenly; a sum is a mean by one.
KEPT = [case for case in TWO_SHOTS if case[0] == 3 or (case[0] in (2, 8) and case[2] == "mean")]


@pytest.mark.parametrize(("size", "dtype", "op"), cut(TWO_SHOTS, keep=KEPT), ids=str)
def test_two_shots_in_place_have_the_bits_of_the_cpu(symmetric, size, dtype, op):
    scale = 1.0 / size if op == "mean" else 1.0
    for numel, shift in ((1, 0), (63, 1), (5003, 0), (9000, 3)):
        x = buffers(size, numel, dtype, shift=shift)
        expected = of_two_shot(x, scale=scale)
        cut = [parts_of(b, size) for b in x]
        mine = [[cut[p][r] for p in range(size)] for r in range(size)]
        group = Group(symmetric, size)
        group.run(mine, mine, x, scale=scale)
        for rank, got in enumerate(x):
            assert torch.equal(bits(got), bits(expected)), f"rank {rank} of {numel} elements"
            assert (around(got) == -77.0).all(), "written outside of the buffer"
        assert group.failures.tolist() == [0] * size


PAIRS = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP16)]
ONE_SHOT = [(size, *pair) for size in (2, 3, 4, 8) for pair in PAIRS]
# Every pair on three ranks; on other numbers of them one that rounds and one that does not.
ONE_SHOT_KEPT = [
    case for case in ONE_SHOT if case[0] == 3 or (case[0] < 8 and case[1:] in (PAIRS[1], PAIRS[3]))
]


@pytest.mark.parametrize(("size", "to", "source"), cut(ONE_SHOT, keep=ONE_SHOT_KEPT), ids=str)
def test_one_shot_and_reduce_scatter(symmetric, size, to, source):
    """A main gradient in fp32 is the sum before it is rounded; the inputs stay as they are."""
    for numel, in_line in ((5003, True), (777, False)):
        x = buffers(size, numel, source, shift=0 if in_line else 1)
        before = [b.clone() for b in x]
        expected = torch.empty(numel, dtype=to)
        sum_rows_reference(expected, x, scale=0.3)
        group = Group(symmetric, size)
        outs = [place(torch.zeros(numel), to, shift=0) for _ in range(size)]
        group.run([x] * size, [[out] for out in outs], outs, scale=0.3, in_line=in_line, norm=True)
        assert all(torch.equal(bits(out), bits(expected)) for out in outs), "one shot"
        assert all((around(out) == -77.0).all() for out in outs)
        check_norm(group.norms, [expected] * size)

        cut, wanted = [parts_of(b, size) for b in x], parts_of(expected, size)
        mine = [place(torch.zeros(part.numel()), to, shift=0) for part in wanted]
        rows = [[cut[p][r] for p in range(size)] for r in range(size)]
        group.run(rows, [[out] for out in mine], mine, scale=0.3, in_line=in_line, norm=True)
        for got, want in zip(mine, wanted, strict=True):
            assert torch.equal(bits(got), bits(want)), "reduce-scatter"
            assert (around(got) == -77.0).all()
        check_norm(group.norms, wanted)
        assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


def check_norm(norms: Tensor, of: Sequence[Tensor]) -> None:
    for got, x in zip(norms, of, strict=True):
        expected = squared_norm_reference([x])
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0, equal_nan=True)
    norms.fill_(-1.0)


@pytest.mark.parametrize("to", [FP32, BF16], ids=str)
@pytest.mark.parametrize("size", [2, 3, full(8)])
def test_the_norm_of_two_shots_is_that_of_all_ranks(symmetric, size, to):
    """The same bits on every rank, though each sums a part; not of what is rounded away."""
    for bad in (0, 2):
        x = buffers(size, 5003, BF16)
        for k in range(bad):
            x[k][k * 3000] = float("inf")
        expected = torch.empty(5003, dtype=to)
        sum_rows_reference(expected, x, scale=1 / size)
        cut = [parts_of(b, size) for b in x]
        results = [place(torch.zeros(5003), to, shift=0) for _ in range(size)]
        to_all = [parts_of(b, size) for b in results]
        group = Group(symmetric, size)
        group.run(
            [[cut[p][r] for p in range(size)] for r in range(size)],
            [[to_all[p][r] for p in range(size)] for r in range(size)],
            results,
            scale=1 / size,
            norm=True,
            grid=3,
        )
        assert all(torch.equal(bits(got), bits(expected)) for got in results)
        assert (group.norms.view(torch.int64) == group.norms.view(torch.int64)[0]).all()
        assert group.norms[0, 1] == bad
        check_norm(group.norms, [expected] * size)


@pytest.mark.parametrize("grid", [1, 3])
def test_launches_follow_each_other_without_a_reset(symmetric, grid):
    """x = x + x over two ranks: each launch doubles. Epochs wrap around in between."""
    x = [torch.ones(9000) for _ in range(2)]
    cut = [parts_of(b, 2) for b in x]
    mine = [[cut[p][r] for p in range(2)] for r in range(2)]
    group = Group(symmetric, 2)
    near_the_end = -4
    for pad in group.pads:
        words = pad.view(torch.int32)
        words[2 : 2 + 64] = near_the_end
        words[2 + 64 : 2 + 64 + 64 * 32] = near_the_end
    group.run(mine, mine, x, times=7, grid=grid)
    assert all((b == 2.0**7).all() for b in x)
    for pad in group.pads:
        assert pad.view(torch.int32)[2 : 2 + grid].tolist() == [near_the_end + 14] * grid


@pytest.mark.parametrize("size", [2, 3])
def test_a_lost_rank_ends_the_wait_and_is_named(symmetric, size):
    """Within the timeout, on all ranks; the result is nan, and nobody waits there again."""
    lost = size - 1
    x = buffers(size, 5003, BF16)
    theirs = x[lost].clone()
    cut = [parts_of(b, size) for b in x]
    mine = [[cut[p][r] for p in range(size)] for r in range(size)]
    group = Group(symmetric, size)
    group.run(mine, mine, x, timeout=0.2, absent=[lost])
    assert group.failures.tolist() == [*[1 + lost] * (size - 1), 0]
    assert all(got.isnan().all() for got in x[:lost])
    assert torch.equal(x[lost], theirs)
    group.failures.zero_()
    group.run(mine, mine, x, timeout=3600.0)  # would wait for an hour
    assert group.failures.tolist() == [1 + lost] * size, "the late one hears of it, too"


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_was_told_before_the_lost_rank_came_is_heard(symmetric, late):
    """Rank 0 waits for rank 2, which comes between any two of its looks. What rank 0 is told right
    before, that rank 2 is lost, must end its sum: rank 1, which told it, has given up."""
    for look in range(12):
        x = [torch.full((5003,), 2.0) for _ in range(3)]
        out = torch.zeros(5003)
        group = Group(symmetric, 3)
        arrived = group.pads[0].view(torch.int32)[2 + 64 : 2 + 64 + 64 * 32].view(64, 32)
        arrived[:, 1], arrived[:, 2] = 2, 1  # both have come to the first meeting, of two
        symmetric.emulated_between_looks(
            ctypes.c_int64(look), pointer(group.pads[0]), 2, ctypes.c_bool(late), 2
        )
        try:
            group.run([x] * 3, [[out]] * 3, [out] * 3, grid=1, absent=[1, 2])
        finally:
            symmetric.emulated_between_looks(ctypes.c_int64(-1), None, 0, False, 0)
        assert arrived[0, 2] == 2, f"nothing happened before look {look}"
        assert group.failures[0] == (3 if late else 0), f"look {look}"
        assert out.isnan().all() if late else (out == 6.0).all()
