"""The CUDA kernels of LAMB and LARS, compiled for the host, against plain torch: see
test_kernels.py."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from pyops.ops.optimizers.lamb import lamb_reference
from pyops.ops.optimizers.lars import lars_reference
from pyops.ops.optimizers.table import EXP_AVG, EXP_AVG_SQ, table_of
from tests.cuda.test_kernels import (
    APART,
    BF16,
    FP16,
    FP32,
    FP64,
    IN_LINE,
    KNOWN,
    OTHER,
    TOGETHER,
    Lists,
    pointer,
)
from tests.cuda.test_rules import columns_of, compare
from tests.grids import cut, full

pytestmark = pytest.mark.cpu_only

SLICES, CHUNK = 256, 4096
LAMB = {
    "lr": 0.013,
    "beta1": 0.87,
    "beta2": 0.977,
    "eps": 3e-5,
    "weight_decay": 0.21,
    "min_ratio": 0.02,
    "max_ratio": 9.0,
}
LARS = {
    "lr": 0.13,
    "momentum": 0.87,
    "dampening": 0.3,
    "weight_decay": 0.21,
    "trust_coefficient": 0.6,
    "eps": 1e-4,
}
KINDS: dict[str, tuple[int, dict[str, float], tuple[int, ...], tuple[int, ...], Any]] = {
    "lamb": (0, LAMB, (EXP_AVG, EXP_AVG_SQ), (0, 1, 2, 3, 5, 6, 7), lamb_reference),
    "lars": (1, LARS, (EXP_AVG,), (0, 1, 2, 5, 6, 7), lars_reference),
    "lars without momentum": (1, {**LARS, "momentum": 0.0}, (), (0, 1, 2, 5, 6, 7), lars_reference),
}
# Of parameters and moments that are rounded stochastically.
ROUNDED = ((BF16, BF16), (FP16, FP16), (FP32, BF16))
SHIFTS = pytest.mark.parametrize(
    "shifts", [IN_LINE, TOGETHER, APART], ids=["in line", "together", "apart"]
)


def check(
    kernels: ctypes.CDLL,
    kind: str,
    lists: Lists,
    *,
    maximize: bool = False,
    zero_grads: bool = False,
    stochastic: bool = False,
    lr: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    nesterov: bool = False,
    grid: int = 3,
) -> None:
    number, options, moments, wanted, reference = KINDS[kind]
    columns = columns_of(lists.lists, moments)
    expected, before = ([[t.clone() for t in column] for column in columns] for _ in range(2))
    norms, exact = (torch.zeros(len(columns[0]), 2, dtype=FP64) for _ in range(2))
    flags = {
        "maximize": maximize,
        "zero_grads": zero_grads,
        "stochastic_rounding": stochastic,
        "seed": 5,
    }
    own = {"nesterov": nesterov} if number else {}
    reference(
        *(expected[c] for c in wanted),
        exact,
        lr,
        factor,
        found_inf,
        **options,
        **flags,
        **own,
        trust_ratio=True,
        offsets=lists.offsets,
    )
    table = table_of(columns, lists.offsets)
    kept, partial = table.clone(), torch.full((len(table), SLICES, 2), 7.0, dtype=FP64)
    kernels.emulated_layers(
        grid,
        number,
        pointer(table),
        len(table),
        pointer(lr),
        int(lr is not None and lr.dtype == FP64),
        pointer(factor),
        pointer(found_inf),
        (ctypes.c_double * len(options))(*options.values()),
        nesterov | maximize << 1 | zero_grads << 2 | stochastic << 3,
        ctypes.c_uint64(5),
        pointer(partial),
        pointer(norms),
    )
    assert torch.equal(table, kept), "the table, ticket included, is as it was"
    if found_inf is not None:
        for column, old in zip(columns, before, strict=True):
            for got, was in zip(column, old, strict=True):
                assert torch.equal(
                    got, torch.zeros_like(was) if zero_grads and column is columns[1] else was
                )
        return
    torch.testing.assert_close(norms, exact, rtol=1e-5, atol=1e-12)
    for sums, param in zip(partial, columns[0], strict=True):  # no row is entered for nothing
        slices = min(SLICES, -(-param.numel() // CHUNK))
        assert (sums[:slices] != 7.0).all()
        assert (sums[slices:] == 7.0).all()
    compare(columns, expected, before)


@SHIFTS
@pytest.mark.parametrize(
    ("p", "g", "m", "master"), [KNOWN[0], KNOWN[3], KNOWN[5], OTHER[1]], ids=str
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_against_plain_torch(kernels, kind, p, g, m, master, shifts):
    check(kernels, kind, Lists(p, g, m, master=master, shifts=shifts))


@pytest.mark.parametrize(
    ("kind", "p", "m"),
    cut(
        [(kind, *pm) for kind in KINDS for pm in ROUNDED],
        keep=[(kind, *pm) for kind, pm in zip(KINDS, ROUNDED, strict=True)],
    ),
    ids=str,
)
def test_stochastic_rounding_uses_the_bits_of_the_element(kernels, kind, p, m):
    for shifts in (TOGETHER, APART):
        check(kernels, kind, Lists(p, p, m, shifts=shifts), stochastic=True)


def test_nesterov_and_the_first_step(kernels):
    for first in (False, True):
        lists = Lists(FP32, FP32, FP32, sizes=(1, 7, 0, 4099))
        for step in lists.lists[7]:
            step.fill_(0.0 if first else 4.0)
        check(kernels, "lars", lists, nesterov=True)


@pytest.mark.parametrize("kind", list(KINDS))
def test_with_everything(kernels, kind):
    lists = Lists(BF16, BF16, FP32, master=FP32, copy=BF16, shifts=TOGETHER)
    check(
        kernels,
        kind,
        lists,
        maximize=True,
        zero_grads=True,
        lr=torch.tensor(0.02, dtype=FP64),
        factor=torch.tensor(0.3),
    )
    assert all((g == 0).all() for g in lists.lists[1])


@pytest.mark.parametrize("zero_grads", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_found_inf_changes_nothing_but_zeroed_gradients(kernels, kind, zero_grads):
    check(kernels, kind, Lists(FP32, FP32, FP32), zero_grads=zero_grads, found_inf=torch.ones(1))


@pytest.mark.parametrize("kind", list(KINDS))
def test_layers_of_one_parameter_count_its_step_once(kernels, kind):
    number, options, moments, _, _ = KINDS[kind]
    lists = Lists(FP32, FP32, FP32, sizes=(70, 4100, 9))
    lists.lists[7][1] = lists.lists[7][0]
    first, last = lists.lists[7][0].item(), lists.lists[7][2].item()
    table = table_of(columns_of(lists.lists, moments), lists.offsets)
    partial, norms = (
        torch.zeros(len(table), SLICES, 2, dtype=FP64),
        torch.zeros(len(table), 2, dtype=FP64),
    )
    kernels.emulated_layers(
        2,
        number,
        pointer(table),
        len(table),
        None,
        0,
        None,
        None,
        (ctypes.c_double * len(options))(*options.values()),
        0,
        ctypes.c_uint64(0),
        pointer(partial),
        pointer(norms),
    )
    assert (lists.lists[7][0].item(), lists.lists[7][2].item()) == (first + 1, last + 1)


@pytest.mark.parametrize("kind", ["lamb", full("lars"), full("lars without momentum")])
def test_the_grid_changes_no_bit(kernels, kind):
    results = []
    for grid in (1, 5):
        lists = Lists(FP32, FP32, FP32)
        check(kernels, kind, lists, grid=grid)
        results.append(lists.lists[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
