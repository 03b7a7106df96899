"""The CUDA kernels of Adafactor, compiled for the host, against plain torch: see
test_kernels.py."""

from __future__ import annotations

import ctypes
from math import prod

import pytest
import torch

from pyops.ops.optimizers.adafactor import adafactor_reference
from pyops.ops.optimizers.table import table_of
from tests.cuda.test_kernels import BF16, FP16, FP32, FP64, around, place, pointer
from tests.grids import full

pytestmark = pytest.mark.cpu_only

# Tiles are of 128 rows and 256 columns: matrices of one number, of several tiles both ways, several
# matrices, vectors of less than a row of a tile and of more than a tile.
SHAPES = ((1, 1), (300, 7), (5, 600), (2, 130, 257), (), (7,), (0,), (0, 4), (33001,))
FEW_SHAPES = ((5, 600), (130, 3), (901,))
OPTIONS = {
    "lr": 0.013,
    "beta2_decay": -0.7,
    "eps1": -1.0,
    "eps2": 2e-3,
    "d": 0.9,
    "weight_decay": 0.21,
}


class Tensors:
    """The lists of adafactor_ with random values; gradients of rows and columns that differ."""

    def __init__(
        self,
        p: torch.dtype,
        g: torch.dtype,
        *,
        master: torch.dtype | None = None,
        copy: torch.dtype | None = None,
        shift: int = 0,
        shapes: tuple[tuple[int, ...], ...] = SHAPES,
    ) -> None:
        torch.manual_seed(len(shapes) + shift)
        self.shapes = shapes

        def values(scale: float) -> list[torch.Tensor]:
            found = []
            for shape in shapes:
                x = torch.randn(shape) * scale
                if x.dim() > 1 and x.numel():
                    x = x * torch.linspace(0.2, 3.0, shape[-1]) * torch.rand(*shape[:-1], 1)
                found.append(x.reshape(-1))
            return found

        def column(dtype: torch.dtype | None, scale: float) -> list[torch.Tensor]:
            if dtype is None:
                return []
            return [
                place(x, dtype, shift=shift).view(shape)
                for x, shape in zip(values(scale), shapes, strict=True)
            ]

        self.params, self.grads = column(p, 1.0), column(g, 0.1)
        self.masters, self.copies = column(master, 1.0), column(copy, 1.0)
        states = [(s[:-1], (*s[:-2], s[-1])) if len(s) > 1 else ((0,), (0,)) for s in shapes]
        self.row_vars = [torch.rand(rows) * 0.01 for rows, _ in states]
        self.col_vars = [torch.rand(columns) * 0.01 for _, columns in states]
        self.variances = [torch.rand(s if len(s) < 2 else 0) * 0.01 for s in shapes]
        self.steps = [torch.tensor(float(3 + i % 3)) for i in range(len(shapes))]
        self.offsets = [5 * i for i in range(len(shapes))]

    def columns(self) -> list[list[torch.Tensor]]:
        return [
            *(self.params, self.grads, self.row_vars, self.col_vars, self.variances),
            *(self.masters, self.copies, self.steps),
        ]


def _addresses(tensors: list[torch.Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])


def emulate(
    kernels: ctypes.CDLL,
    x: Tensors,
    *,
    maximize: bool = False,
    zero_grads: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    lr: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    grid: int = 3,
) -> None:
    table = table_of([x.params, x.grads, [], [], [], x.masters, x.copies, x.steps], x.offsets)
    before = table.clone()
    shapes = [
        n
        for s in x.shapes
        for n in ((prod(s[:-2]), *s[-2:]) if len(s) > 1 and prod(s) else (0, 0, prod(s)))
    ]
    stepped = x.masters or x.params
    kernels.emulated_adafactor(
        grid,
        pointer(table),
        len(table),
        (ctypes.c_int64 * len(shapes))(*shapes),
        _addresses(x.row_vars),
        _addresses(x.col_vars),
        _addresses(x.variances),
        (ctypes.c_double * len(stepped))(*[torch.finfo(t.dtype).eps for t in stepped]),
        pointer(lr),
        int(lr is not None and lr.dtype == FP64),
        pointer(factor),
        pointer(found_inf),
        (ctypes.c_double * 6)(*OPTIONS.values()),
        maximize << 1 | zero_grads << 2 | stochastic << 3,
        ctypes.c_uint64(seed),
    )
    assert torch.equal(table, before), "the table, ticket included, is as it was"


def check(kernels: ctypes.CDLL, x: Tensors, **given: object) -> None:
    """Within a few last places of the reference, whose sums are in another order."""
    before = [[t.clone() for t in column] for column in x.columns()]
    expected = [[t.clone() for t in column] for column in x.columns()]
    options = {"maximize": False, "zero_grads": False, "stochastic": False, "seed": 0, **given}
    lr, factor, found_inf = (options.pop(name, None) for name in ("lr", "factor", "found_inf"))
    adafactor_reference(
        *expected,
        lr,
        factor,
        found_inf,
        **OPTIONS,
        maximize=options["maximize"],
        zero_grads=options["zero_grads"],
        stochastic_rounding=options["stochastic"],
        seed=options["seed"],
        offsets=x.offsets,
    )
    emulate(kernels, x, lr=lr, factor=factor, found_inf=found_inf, **options)
    names = ("param", "grad", "row_var", "col_var", "variance", "master", "copy", "step")
    for name, got, want, was in zip(names, x.columns(), expected, before, strict=True):
        for i, (a, b, old) in enumerate(zip(got, want, was, strict=True)):
            if name in ("param", "grad", "master", "copy") and a.numel():
                assert (around(a.view(-1)) == -77.0).all(), f"{name}[{i}]: written outside of it"
            if a.dtype == FP32:
                allowed = 2.0**-22 * (old.abs() + b.abs()) + 1e-8
                assert ((a - b).abs() <= allowed).all(), f"{name}[{i}]: {(a - b).abs().max():.3g}"
            elif a.numel():
                # A number between two may fall either way; a copy is of what was stored.
                eps = max(torch.finfo(t.dtype).eps for t in (a, x.params[i]))
                torch.testing.assert_close(a.float(), b.float(), rtol=2 * eps, atol=1e-6)
                assert (a != b).sum() <= 1 + a.numel() // 200, f"{name}[{i}]"
            if name in ("param", "row_var", "variance") and a.numel() > 100 and found_inf is None:
                assert not torch.equal(a, old), "a step that does nothing would pass"


@pytest.mark.parametrize(
    ("p", "g", "master", "copy", "shift"),
    [
        full(FP32, FP32, None, None, 0),
        (BF16, BF16, FP32, None, 3),
        full(FP16, FP32, FP32, BF16, 1),
        (BF16, FP16, None, FP16, 1),
        full(FP32, BF16, None, None, 0),
    ],
    ids=str,
)
def test_dtypes(kernels, p, g, master, copy, shift):
    check(kernels, Tensors(p, g, master=master, copy=copy, shift=shift))


def test_options(kernels):
    x = Tensors(FP32, BF16, copy=BF16)
    lr, factor = torch.tensor(0.02, dtype=FP64), torch.tensor(0.3)
    check(kernels, x, maximize=True, zero_grads=True, lr=lr, factor=factor)
    assert all((g == 0).all() for g in x.grads)
    check(kernels, Tensors(FP32, FP32), lr=torch.tensor(1e-4), factor=torch.tensor(0.7))


@pytest.mark.parametrize("zero_grads", [full(False), True])
def test_found_inf_changes_nothing_but_zeroed_gradients(kernels, zero_grads):
    x = Tensors(BF16, BF16, master=FP32, copy=FP16, shapes=FEW_SHAPES)
    before = [[t.clone() for t in column] for column in x.columns()]
    emulate(kernels, x, zero_grads=zero_grads, found_inf=torch.tensor(1.0))
    for which, (column, old) in enumerate(zip(x.columns(), before, strict=True)):
        for got, was in zip(column, old, strict=True):
            assert torch.equal(got, torch.zeros_like(was) if zero_grads and which == 1 else was)
    check(kernels, Tensors(FP32, FP32, shapes=FEW_SHAPES), found_inf=torch.tensor(0.0))


def test_stochastic_rounding_uses_the_bits_of_the_element(kernels):
    x, to_nearest = (Tensors(BF16, FP32, shapes=FEW_SHAPES) for _ in range(2))
    check(kernels, x, stochastic=True, seed=(1 << 40) + 17)
    emulate(kernels, to_nearest)
    assert not torch.equal(x.params[0], to_nearest.params[0]), "rounded to nearest"


@pytest.mark.full
def test_the_grid_does_not_matter(kernels):
    """Sums are in an order that the shapes alone decide."""
    found = [Tensors(FP32, FP32) for _ in range(3)]
    for x, grid in zip(found, (1, 3, 13), strict=True):
        emulate(kernels, x, grid=grid)
    for other in found[1:]:
        for a, b in zip(found[0].columns(), other.columns(), strict=True):
            assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
