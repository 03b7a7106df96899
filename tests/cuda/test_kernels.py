"""The CUDA kernels compiled for the host (tests/cuda/emulation) against plain torch: what they
compute, without a GPU.

Wrong indexing, dtypes, rounding, random bits, tickets and reductions show here; races, speed and
the launch do not.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyops.ops.communication.reduce import (
    accumulate_reference,
    scale_cast_reference,
    sum_rows_reference,
)
from pyops.ops.optimizers.grad_norm import squared_norm_reference
from pyops.ops.optimizers.optim import adam_reference
from pyops.ops.optimizers.table import COLUMNS, PACKED, table_of
from pyops.ops.random import (
    philox_dropout_mask_reference,
    philox_normal_reference,
    philox_uniform_reference,
)
from tests.grids import full

pytestmark = pytest.mark.cpu_only

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
CODES = {FP32: 0, BF16: 1, FP16: 2, FP64: 3}
SIZES = (1, 7, 0, 4096, 5003, 64, 12301)


def pointer(t: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr() if t is not None else None)


def place(values: torch.Tensor, dtype: torch.dtype, *, shift: int) -> torch.Tensor:
    """The values as a view that begins `shift` elements into a buffer, with room behind it."""
    buffer = torch.full((values.numel() + shift + 16,), -77.0, dtype=dtype)
    view = buffer[shift : shift + values.numel()]
    view.copy_(values)
    return view


def around(view: torch.Tensor) -> torch.Tensor:
    """The buffer's elements outside the view: nothing may ever write there."""
    whole = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
    return torch.cat(
        [whole[: view.storage_offset()], whole[view.storage_offset() + view.numel() :]]
    )


class Lists:
    """The eight lists of an optimizer's rows with random values."""

    def __init__(
        self,
        p: torch.dtype,
        g: torch.dtype,
        m: torch.dtype,
        *,
        master: torch.dtype | None = None,
        copy: torch.dtype | None = None,
        amsgrad: bool = False,
        shifts: tuple[int, ...] = (0,) * 7,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        torch.manual_seed(len(sizes) + sum(shifts))
        none = torch.empty(0)

        def column(
            which: int, dtype: torch.dtype | None, scale: float, positive: bool = False
        ) -> list[torch.Tensor]:
            values = [torch.randn(n) * scale for n in sizes]
            return [
                none
                if dtype is None
                else place(x.abs() if positive else x, dtype, shift=shifts[which])
                for x in values
            ]

        self.lists = [
            column(0, p, 1.0),
            column(1, g, 0.1),
            column(2, m, 0.1),
            column(3, m, 0.01, positive=True),
            column(4, m if amsgrad else None, 0.01, positive=True),
            column(5, master, 1.0),
            column(6, copy, 1.0),
            [torch.tensor(float(3 + i % 3)) for i in range(len(sizes))],
        ]
        self.offsets = [5 * i for i in range(len(sizes))]

    def clone(self) -> list[list[torch.Tensor]]:
        return [[t.clone() for t in column] for column in self.lists]


OPTIONS = {"lr": 0.013, "beta1": 0.87, "beta2": 0.977, "eps": 3e-7, "weight_decay": 0.21}


def emulate(
    kernels: ctypes.CDLL,
    lists: Lists,
    *,
    decoupled: bool = True,
    maximize: bool = False,
    zero_grads: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    lr: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    grid: int = 3,
) -> None:
    table = table_of(lists.lists, lists.offsets)
    before = table.clone()
    flags = decoupled | maximize << 1 | zero_grads << 2 | stochastic << 3
    kernels.emulated_step(
        grid,
        0,
        pointer(table),
        len(table),
        pointer(lr),
        int(lr is not None and lr.dtype == FP64),
        pointer(factor),
        pointer(found_inf),
        (ctypes.c_double * 5)(*OPTIONS.values()),
        flags,
        ctypes.c_uint64(seed),
    )
    assert torch.equal(table, before), "the table, ticket included, is as it was"


def check(
    kernels: ctypes.CDLL,
    lists: Lists,
    *,
    decoupled: bool = True,
    maximize: bool = False,
    zero_grads: bool = False,
    lr: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    stochastic: bool = False,
    seed: int = 0,
) -> None:
    expected = lists.clone()
    before = lists.clone()
    flags = {"decoupled": decoupled, "maximize": maximize, "zero_grads": zero_grads}
    adam_reference(
        *expected,
        lr,
        factor,
        found_inf,
        **OPTIONS,
        **flags,
        stochastic_rounding=stochastic,
        seed=seed,
        offsets=lists.offsets,
    )
    emulate(
        kernels,
        lists,
        lr=lr,
        factor=factor,
        found_inf=found_inf,
        stochastic=stochastic,
        seed=seed,
        **flags,
    )
    for name, column, wanted, old in zip("pgmvxwcs", lists.lists, expected, before, strict=True):
        for row, (got, want, was) in enumerate(zip(column, wanted, old, strict=True)):
            if name != "s" and got.numel():
                assert (around(got) == -77.0).all(), f"{name}[{row}]: written outside of the tensor"
            if got.dtype == FP32:
                # A few last places of the numbers that were added, gradient and update (here at
                # most 0.5) among them.
                allowed = 2.0**-22 * (was.abs() + want.abs()) + 2.0**-24 * 0.5
                assert ((got - want).abs() <= allowed).all(), (
                    f"{name}[{row}]: off by {(got - want).abs().max():.3g}"
                )
            elif (
                got.numel()
            ):  # a value at the boundary between two 16-bit numbers may fall either way
                torch.testing.assert_close(
                    got.float(), want.float(), rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6
                )
                assert (got != want).sum() <= 1 + got.numel() // 200, (
                    f"{name}[{row}]: {int((got != want).sum())} differ"
                )
            if name in "pmv" and got.numel() > 100 and found_inf is None:
                assert not torch.equal(got, was), "a step that does nothing would pass"


KNOWN = [
    (FP32, FP32, FP32, None),
    (FP32, FP32, BF16, None),
    (FP32, FP32, FP16, None),
    (BF16, BF16, FP32, FP32),
    (BF16, FP32, FP32, FP32),
    (BF16, BF16, BF16, None),
    (FP16, FP16, FP32, FP32),
    (FP16, FP32, FP32, FP32),
    (FP16, FP16, FP16, None),
    (FP32, BF16, FP32, None),
    (BF16, BF16, FP32, None),
]
OTHER = [
    (BF16, FP16, FP16, FP16),
    (FP16, BF16, FP32, None),
    (BF16, BF16, BF16, FP32),
]
IN_LINE, TOGETHER, APART = (0,) * 7, (3,) * 7, (3, 1, 0, 2, 5, 4, 1)


@pytest.mark.parametrize(
    "shifts",
    [
        pytest.param(IN_LINE, id="in line"),
        full(TOGETHER, id="out of line together"),
        pytest.param(APART, id="out of line apart"),
    ],
)
@pytest.mark.parametrize(("p", "g", "m", "master"), KNOWN + OTHER, ids=str)
def test_adam_of_all_dtypes(kernels, p, g, m, master, shifts):
    check(kernels, Lists(p, g, m, master=master, shifts=shifts))


@pytest.mark.parametrize(
    ("dtypes", "wanted"), [((FP32, FP32, FP32), 64), ((BF16, BF16, BF16), 32)], ids=str
)
def test_rows_out_of_line_have_four_elements_in_flight(kernels, dtypes, wanted):
    """One at a time, it was a quarter of that: a row's latency for each element of a thread."""
    lists = Lists(*dtypes, sizes=(5003,), shifts=APART)
    kernels.emulated_asked()
    emulate(kernels, lists)
    assert kernels.emulated_asked() == wanted
    rows = [place(torch.randn(5003), FP32, shift=shift) for shift in (0, 1)]
    kernels.emulated_sum(
        3,
        pointer(rows[0]),
        (ctypes.c_void_p * 1)(rows[1].data_ptr()),
        1,
        1,
        ctypes.c_double(1.0),
        ctypes.c_int64(5003),
        0,
        0,
        -1,
    )
    assert kernels.emulated_asked() == 32


@pytest.mark.parametrize("copy", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("p", "g", "m", "master"), [KNOWN[0], KNOWN[3], KNOWN[5], OTHER[0]], ids=str
)
def test_adam_with_everything(kernels, p, g, m, master, copy):
    lists = Lists(p, g, m, master=master, copy=copy, amsgrad=True, shifts=TOGETHER)
    lr, factor = torch.tensor(0.02, dtype=FP64), torch.tensor(0.3)
    check(kernels, lists, decoupled=False, maximize=True, zero_grads=True, lr=lr, factor=factor)
    assert all((g == 0).all() for g in lists.lists[1])
    check(
        kernels,
        Lists(p, g, m, master=master, copy=copy),
        zero_grads=True,
        lr=torch.tensor(0.02),
        factor=torch.tensor(0.7),
    )


@pytest.mark.parametrize("zero_grads", [False, True])
def test_found_inf_changes_nothing_but_zeroed_gradients(kernels, zero_grads):
    lists = Lists(BF16, BF16, FP32, master=FP32, copy=FP16, shifts=TOGETHER)
    before = lists.clone()
    check(kernels, lists, zero_grads=zero_grads, found_inf=torch.tensor(1.0))
    for which, (column, old) in enumerate(zip(lists.lists, before, strict=True)):
        for got, was in zip(column, old, strict=True):
            assert torch.equal(got, torch.zeros_like(was) if zero_grads and which == 1 else was)
    check(kernels, lists, found_inf=torch.tensor(0.0))


@pytest.mark.parametrize(
    "shifts",
    [IN_LINE, TOGETHER, APART],
    ids=["in line", "out of line together", "out of line apart"],
)
@pytest.mark.parametrize(
    ("p", "g", "m", "master"), [KNOWN[1], KNOWN[2], KNOWN[5], KNOWN[8], *OTHER], ids=str
)
def test_stochastic_rounding_uses_the_bits_of_the_element(kernels, p, g, m, master, shifts):
    lists, to_nearest = (
        Lists(p, g, m, master=master, shifts=shifts, amsgrad=m == FP16) for _ in range(2)
    )
    check(kernels, lists, stochastic=True, seed=(1 << 40) + 17)
    emulate(kernels, to_nearest)
    rounded = 0 if p != FP32 and master is None else 2
    if lists.lists[rounded][3].dtype != FP32:
        assert not torch.equal(lists.lists[rounded][3], to_nearest.lists[rounded][3]), (
            "rounded to nearest"
        )


@pytest.mark.parametrize("grid", [1, 2, 13])
def test_the_grid_does_not_matter(kernels, grid):
    one, other = (Lists(BF16, BF16, BF16, sizes=(40, 9000, 0, 3)) for _ in range(2))
    emulate(kernels, one, stochastic=True, grid=3)
    emulate(kernels, other, stochastic=True, grid=grid)
    for a, b in zip(one.lists, other.lists, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_norm(kernels, dtype):
    lists = Lists(FP32, dtype, FP32, shifts=(0, 3, 0, 0, 0, 0, 0))
    gradients = lists.lists[1]
    results = []
    for bad in (0, 3):
        for i in range(bad):
            value = (float("inf"), float("-inf"), float("nan"))[i]
            gradients[3 + i][-1 - i] = value
            # Where a thread looks at its numbers in pairs, one of which alone is not finite.
            max(gradients, key=len)[4200 + 101 * i] = value
        table, out = table_of(lists.lists, lists.offsets), torch.full((2,), -1.0, dtype=FP64)
        kernels.emulated_norm(7, pointer(table), len(table), pointer(out))
        expected = squared_norm_reference(gradients)
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=0, equal_nan=True)
        listed = torch.full((2,), -1.0, dtype=FP64)
        kernels.emulated_norm_of_list(
            7,
            (ctypes.c_void_p * len(gradients))(*[g.data_ptr() for g in gradients]),
            (ctypes.c_int64 * len(gradients))(*[g.numel() for g in gradients]),
            CODES[dtype],
            len(gradients),
            pointer(listed),
        )
        assert torch.equal(listed.view(torch.int64), out.view(torch.int64)), (
            "table and list give the same bits"
        )
        results.append(out)
    assert results[0][0] > 1
    assert results[1][1] == 6


@pytest.mark.parametrize("numel", [1, 5, 4096, 9999])
@pytest.mark.parametrize(
    ("to", "source"),
    [(a, b) for a in (FP32, BF16, FP16) for b in (FP32, BF16, FP16)] + [(FP64, FP64)],
    ids=str,
)
def test_sums(kernels, to, source, numel):
    for count, with_out, shift in ((1, True, 0), (1, False, 1), (5, False, 3)):
        pack = 16 // max(to.itemsize, source.itemsize)
        for head in (-shift % pack, -1):
            rows = [place(torch.randn(numel), source, shift=shift) for _ in range(count)]
            out = place(torch.randn(numel), to, shift=shift)
            expected = out.clone()
            if with_out:
                accumulate_reference(expected, rows[0], scale=0.7)
            elif count == 1:
                scale_cast_reference(expected, rows[0], scale=0.7)
            else:
                sum_rows_reference(expected, rows, scale=0.7)
            addresses = (ctypes.c_void_p * count)(*[row.data_ptr() for row in rows])
            kernels.emulated_sum(
                3,
                pointer(out),
                addresses,
                count,
                with_out,
                ctypes.c_double(0.7),
                ctypes.c_int64(numel),
                CODES[to],
                CODES[source],
                head,
            )
            assert torch.equal(out, expected)
            assert (around(out) == -77.0).all()


@pytest.mark.parametrize(
    "where",
    [(0, 1 << 40, 0), (3, 1 << 40, 0), (6, 10, 37), ((1 << 34) + 1, 3, 1), (2, 1, 5)],
    ids=str,
)
def test_random_bits(kernels, where):
    offset, row, row_stride = where
    key = 0x9876543210ABCDEF
    signed = key - (1 << 64)
    for shift in (0, 1):
        for kind, reference in enumerate(
            (philox_uniform_reference, philox_normal_reference, philox_dropout_mask_reference)
        ):
            # Three turns of the one CTA's threads.
            out = torch.zeros(2601 + shift, dtype=torch.bool if kind == 2 else FP32)[shift:]
            expected = out.clone()
            extra = {"p": 0.3} if kind == 2 else {}
            reference(expected, key=signed, offset=offset, row=row, row_stride=row_stride, **extra)
            kernels.emulated_random(
                1,
                kind,
                pointer(out),
                ctypes.c_int64(out.numel()),
                ctypes.c_float(0.3),
                ctypes.c_uint64(key),
                ctypes.c_int64(offset),
                ctypes.c_int64(row),
                ctypes.c_int64(row_stride),
            )
            assert torch.equal(out, expected), kind
            assert out.float().std() > 0.2


def test_the_ticket_has_room():
    assert PACKED < COLUMNS
    lists = Lists(FP16, FP16, FP16, master=FP16, copy=FP16)
    assert int(table_of(lists.lists, lists.offsets)[:, PACKED].max()) < 1 << 32
