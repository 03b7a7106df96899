"""The CUDA kernels of the other elementwise optimizers, compiled for the host, against plain torch:
see test_kernels.py."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyops.ops.optimizers.adagrad import adagrad_reference
from pyops.ops.optimizers.frozen_adam import frozen_adam_reference, momentum_reference
from pyops.ops.optimizers.lion import lion_reference
from pyops.ops.optimizers.sgd import sgd_reference
from pyops.ops.optimizers.table import EXP_AVG, EXP_AVG_SQ, GRAD, MAX, PARAM, STEP, table_of
from tests.cuda.test_kernels import (
    APART,
    FP16,
    FP32,
    IN_LINE,
    KNOWN,
    OTHER,
    TOGETHER,
    Lists,
    around,
    pointer,
)

pytestmark = pytest.mark.cpu_only

# Rule: its number for emulated_step, the options in order, the moments it works on, and the
# reference.
RULES = {
    "sgd": (
        1,
        {"lr": 0.013, "momentum": 0.0, "dampening": 0.3, "weight_decay": 0.21},
        (),
        sgd_reference,
    ),
    "momentum sgd": (
        1,
        {"lr": 0.013, "momentum": 0.87, "dampening": 0.3, "weight_decay": 0.21},
        (EXP_AVG,),
        sgd_reference,
    ),
    "lion": (
        2,
        {"lr": 0.013, "beta1": 0.87, "beta2": 0.977, "weight_decay": 0.21},
        (EXP_AVG,),
        lion_reference,
    ),
    "adagrad": (
        3,
        {"lr": 0.013, "lr_decay": 0.4, "weight_decay": 0.21, "eps": 3e-7},
        (EXP_AVG_SQ,),
        adagrad_reference,
    ),
}
SHIFTS = pytest.mark.parametrize(
    "shifts",
    [IN_LINE, TOGETHER, APART],
    ids=["in line", "out of line together", "out of line apart"],
)
Columns = list[list[torch.Tensor]]


def columns_of(lists: Columns, moments: tuple[int, ...]) -> Columns:
    """The lists without the moments that a rule does not have."""
    return [
        [] if EXP_AVG <= c <= MAX and c not in moments else tensors
        for c, tensors in enumerate(lists)
    ]


def compare(columns: Columns, expected: Columns, before: Columns) -> None:
    for name, column, wanted, old in zip("pgmvxwcs", columns, expected, before, strict=True):
        for row, (got, want, was) in enumerate(zip(column, wanted, old, strict=True)):
            if name != "s" and got.numel():
                assert (around(got) == -77.0).all(), f"{name}[{row}]: written outside of the tensor"
            if got.dtype == FP32:
                allowed = 2.0**-21 * (was.abs() + want.abs()) + 2.0**-24
                assert ((got - want).abs() <= allowed).all(), (
                    f"{name}[{row}]: off by {(got - want).abs().max():.3g}"
                )
            elif got.numel():
                torch.testing.assert_close(
                    got.float(), want.float(), rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6
                )
                assert (got != want).sum() <= 1 + got.numel() // 200, (
                    f"{name}[{row}]: {int((got != want).sum())} differ"
                )
            if name in "pmv" and got.numel() > 100:
                assert not torch.equal(got, was), "a step that does nothing would pass"


def check(
    kernels: ctypes.CDLL,
    rule: str,
    lists: Lists,
    *,
    first: bool = False,
    maximize: bool = False,
    zero_grads: bool = False,
    stochastic: bool = False,
    lr: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> None:
    number, options, moments, reference = RULES[rule]
    columns = columns_of(lists.lists, moments)
    expected, before = ([[t.clone() for t in column] for column in columns] for _ in range(2))
    flags = {"nesterov": first} if reference is sgd_reference else {}
    operands = [expected[c] for c in (PARAM, GRAD)]
    operands += [
        expected[moments[0] if moments else EXP_AVG],
        *expected[MAX + 1 : STEP],
        expected[STEP],
    ]
    reference(
        *operands,
        lr,
        factor,
        None,
        **options,
        **flags,
        maximize=maximize,
        zero_grads=zero_grads,
        stochastic_rounding=stochastic,
        seed=77,
        offsets=lists.offsets,
    )
    table = table_of(columns, lists.offsets)
    kernels.emulated_step(
        3,
        number,
        pointer(table),
        len(table),
        pointer(lr),
        int(lr is not None and lr.dtype == torch.float64),
        pointer(factor),
        None,
        (ctypes.c_double * 5)(*options.values()),
        first | maximize << 1 | zero_grads << 2 | stochastic << 3,
        ctypes.c_uint64(77),
    )
    compare(columns, expected, before)


@SHIFTS
@pytest.mark.parametrize("rule", RULES)
def test_all_dtypes(kernels, rule, shifts):
    for p, g, m, master in KNOWN + OTHER:
        check(kernels, rule, Lists(p, g, m, master=master, shifts=shifts, sizes=(1, 7, 0, 4099)))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_with_everything(kernels, rule, first):
    for p, g, m, master in (KNOWN[0], KNOWN[3], KNOWN[5], OTHER[0]):
        lists = Lists(p, g, m, master=master, copy=FP16, shifts=TOGETHER, sizes=(1, 7, 0, 4099))
        for step in lists.lists[STEP]:
            step.fill_(0.0 if first else 4.0)
        check(
            kernels,
            rule,
            lists,
            first=first,
            maximize=True,
            zero_grads=True,
            lr=torch.tensor(0.02),
            factor=torch.tensor(0.3),
        )
        assert not any(g.any() for g in lists.lists[GRAD])


@pytest.mark.parametrize("rule", RULES)
def test_stochastic_rounding_uses_the_bits_of_the_element(kernels, rule):
    for p, g, m, master in (KNOWN[5], KNOWN[8], OTHER[1]):
        check(
            kernels,
            rule,
            Lists(p, g, m, master=master, shifts=APART, sizes=(1, 7, 0, 4099)),
            stochastic=True,
        )


@SHIFTS
@pytest.mark.parametrize(
    ("p", "m", "master"), [(FP32, FP32, None), (FP16, FP32, FP32), (FP16, FP16, None)], ids=str
)
def test_frozen_adam(kernels, p, m, master, shifts):
    lists = Lists(p, FP32, m, master=master, copy=FP16, shifts=shifts).lists
    lists[EXP_AVG_SQ][3][::3] = 0.0
    params, _, exp_avgs, exp_avg_sqs, _, masters, copies, _ = lists
    columns = [params, [], exp_avgs, exp_avg_sqs, [], masters, copies, []]
    expected, before = ([[t.clone() for t in column] for column in columns] for _ in range(2))
    frozen_adam_reference(
        *(expected[c] for c in (0, 2, 3, 5, 6)), lr=0.013, eps=3e-7, weight_decay=0.21
    )
    table = table_of(columns, [], (PARAM, EXP_AVG, EXP_AVG_SQ))
    kernels.emulated_step(
        3,
        4,
        pointer(table),
        len(table),
        None,
        0,
        None,
        None,
        (ctypes.c_double * 3)(0.013, 3e-7, 0.21),
        0,
        ctypes.c_uint64(0),
    )
    assert all(
        torch.equal(a, b) for c in (2, 3) for a, b in zip(columns[c], before[c], strict=True)
    ), "they are only read"
    columns[2] = columns[3] = expected[2] = expected[3] = before[2] = before[3] = []
    compare(columns, expected, before)


def test_momentum(kernels):
    lists = Lists(FP32, FP16, FP32, shifts=TOGETHER).lists
    columns: Columns = [lists[0], lists[1], [], [], [], [], [], []]
    expected, before = ([[t.clone() for t in column] for column in columns] for _ in range(2))
    factor = torch.tensor(0.3)
    momentum_reference(expected[0], expected[1], factor, beta=0.87)
    table = table_of(columns, [], (PARAM, GRAD))
    kernels.emulated_step(
        3,
        5,
        pointer(table),
        len(table),
        None,
        0,
        pointer(factor),
        None,
        (ctypes.c_double * 1)(0.13),
        0,
        ctypes.c_uint64(0),
    )
    compare(columns, expected, before)


def test_a_table_of_another_rule_is_passed_over(kernels):
    lists = Lists(FP32, FP32, FP32)
    columns = columns_of(lists.lists, (EXP_AVG,))
    before = [t.clone() for t in columns[PARAM]]
    table = table_of(columns, lists.offsets)
    number, options, *_ = RULES["adagrad"]
    numbers = (ctypes.c_double * 5)(*options.values())
    kernels.emulated_step(
        3, number, pointer(table), len(table), None, 0, None, None, numbers, 0, ctypes.c_uint64(0)
    )
    assert all(torch.equal(a, b) for a, b in zip(columns[PARAM], before, strict=True))
