"""SGD, Lion and Adagrad on rows of every mix of dtypes, element by element against their formulas
in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import library
from pyops.ops.optimizers import adagrad, lion, sgd
from pyops.ops.optimizers.table import EXP_AVG, EXP_AVG_SQ, MAX, STEP, optimizer_table
from tests.ops.optimizers.adam_rows import Dtypes, Rows, make_rows
from tests.ops.optimizers.test_optim import DTYPES, ERRORS
from tests.ops.samples import RULES
from tests.tolerance import assert_close_to_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
AROUND = {"maximize": False, "zero_grads": False, "stochastic_rounding": False, "seed": 7}


def plain_sgd(
    p: Tensor,
    g: Tensor,
    b: Tensor,
    step: int,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor]:
    g = g + weight_decay * p
    if momentum:
        b = momentum * b + (1 - dampening) * g if step > 1 else g
        g = g + momentum * b if nesterov else b
    return p - lr * g, b


def plain_lion(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    step: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    return p * (1 - lr * weight_decay) - lr * (beta1 * m + (1 - beta1) * g).sign(), beta2 * m + (
        1 - beta2
    ) * g


def plain_adagrad(
    p: Tensor,
    g: Tensor,
    s: Tensor,
    step: int,
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    g = g + weight_decay * p
    s = s + g * g
    return p - lr / (1 + (step - 1) * lr_decay) * g / (s.sqrt() + eps), s


SGD: dict[str, Any] = {
    "lr": 0.03,
    "momentum": 0.8,
    "dampening": 0.3,
    "weight_decay": 0.2,
    "nesterov": False,
}
# The op, the one on tables, the formula, the column of its state, options.
CASES: dict[str, tuple[Any, Any, Any, int | None, dict[str, Any]]] = {
    "sgd": (sgd.sgd_, sgd.sgd_from_table_, plain_sgd, None, {**SGD, "momentum": 0.0}),
    "sgd without decay": (
        sgd.sgd_,
        sgd.sgd_from_table_,
        plain_sgd,
        None,
        {**SGD, "momentum": 0.0, "weight_decay": 0.0},
    ),
    "momentum": (sgd.sgd_, sgd.sgd_from_table_, plain_sgd, EXP_AVG, SGD),
    "momentum without decay": (
        sgd.sgd_,
        sgd.sgd_from_table_,
        plain_sgd,
        EXP_AVG,
        {**SGD, "weight_decay": 0.0},
    ),
    "nesterov": (sgd.sgd_, sgd.sgd_from_table_, plain_sgd, EXP_AVG, {**SGD, "nesterov": True}),
    "nesterov without decay": (
        sgd.sgd_,
        sgd.sgd_from_table_,
        plain_sgd,
        EXP_AVG,
        {**SGD, "nesterov": True, "weight_decay": 0.0},
    ),
    "lion": (
        lion.lion_,
        lion.lion_from_table_,
        plain_lion,
        EXP_AVG,
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.2},
    ),
    "adagrad": (
        adagrad.adagrad_,
        adagrad.adagrad_from_table_,
        plain_adagrad,
        EXP_AVG_SQ,
        {"lr": 0.03, "lr_decay": 0.4, "weight_decay": 0.2, "eps": 1e-3},
    ),
    "adagrad without decay": (
        adagrad.adagrad_,
        adagrad.adagrad_from_table_,
        plain_adagrad,
        EXP_AVG_SQ,
        {"lr": 0.03, "lr_decay": 0.4, "weight_decay": 0.0, "eps": 1e-8},
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)
FEW = pytest.mark.parametrize("name", ["sgd", "nesterov", "lion", "adagrad"])


def operands(name: str, lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """The lists of adam_ that the rule's op takes."""
    state = CASES[name][3]
    return [*lists[:2], lists[state] if state is not None else [], *lists[MAX + 1 :]]


def take(name: str, rows: Rows, *scalars: Tensor | None, **changes: Any) -> None:
    function, *_, options = CASES[name]
    function(
        *operands(name, rows.lists),
        *(*scalars, None, None, None)[:3],
        **{**options, **AROUND, "offsets": [], **changes},
    )


def expected(
    name: str, rows: Rows, dtype: torch.dtype, *, factor: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """(parameter or master, state) of each row after a step in `dtype`."""
    *_, formula, state, options = CASES[name]
    primary = rows.lists[5] or rows.params
    return [
        formula(
            p.to(dtype),
            g.to(dtype) * torch.tensor(factor, dtype=dtype),
            rows.lists[state or EXP_AVG][i].to(dtype),
            int(rows.lists[STEP][i]) + 1,
            **options,
        )
        for i, (p, g) in enumerate(zip(primary, rows.lists[1], strict=True))
    ]


def assert_step(name: str, rows: Rows, before: Rows, *, factor: float = 1.0) -> None:
    state, (params, grads, *_, masters, copies, steps) = CASES[name][3], rows.lists
    exact, plain = (
        expected(name, before, torch.float64, factor=factor),
        expected(name, before, F32, factor=factor),
    )
    for i, param in enumerate(params):
        found = [(masters[i] if masters else param, exact[i][0], plain[i][0])]
        if state is not None:
            found.append((rows.lists[state][i], exact[i][1], plain[i][1]))
        for actual, x, p in found:
            tiny = torch.finfo(actual.dtype).eps * x.abs() + torch.finfo(F32).eps * 4
            assert_close_to_reference(actual, p.to(actual.dtype), x, tiny=tiny)
        assert steps[i].item() == before.lists[STEP][i].item() + 1
        assert not masters or torch.equal(param, masters[i].to(param.dtype))
        assert not copies or torch.equal(copies[i], param.to(copies[i].dtype))
        assert torch.equal(grads[i], before.lists[1][i])


@EVERY
def test_against_float64(name: str, device: torch.device, isa: str):
    for dtypes in DTYPES:
        rows = make_rows(dtypes, device)
        for first in (False, True):
            if first:
                for step in rows.lists[STEP]:
                    step.zero_()
            before = rows.clone()
            take(name, rows)
            assert_step(name, rows, before)
            assert not torch.equal(rows.params[5], before.params[5])


@FEW
def test_device_scalars_and_found_inf(name: str, device: torch.device, isa: str):
    rows = make_rows(DTYPES[6], device)
    before, factor = rows.clone(), torch.tensor(0.37, device=device)
    lr = torch.tensor(CASES[name][-1]["lr"], dtype=torch.float64, device=device)
    skip = torch.ones((), device=device)
    take(name, rows, lr, factor, skip)
    for now, then in zip(rows.lists, before.lists, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    take(name, rows, lr, factor, skip - 1, lr=123.0)
    assert_step(name, rows, before, factor=factor.item())
    take(name, rows, None, None, skip, zero_grads=True)
    assert not any(g.any() for g in rows.lists[1])


@FEW
def test_maximize_is_the_step_of_the_negative_gradient(name: str, device: torch.device, isa: str):
    rows = make_rows(DTYPES[0], device)
    other = rows.clone()
    other.lists[1] = [-g for g in other.lists[1]]
    take(name, rows, maximize=True)
    take(name, other)
    assert all(torch.equal(a, b) for a, b in zip(rows.params, other.params, strict=True))


@EVERY
def test_from_table_gives_the_same_bits(name: str, device: torch.device, isa: str):
    *_, from_table, _, state, options = CASES[name]
    for dtypes in DTYPES:
        rows = make_rows(dtypes, device)
        other, offsets = rows.clone(), [100 * i for i in range(len(rows.params))]
        take(name, rows, zero_grads=True, stochastic_rounding=True, offsets=offsets)
        columns = [
            [] if c in (EXP_AVG, EXP_AVG_SQ, MAX) and c != state else column
            for c, column in enumerate(other.lists)
        ]
        table = optimizer_table(*columns, offsets)
        from_table(table, **{**options, **AROUND, "zero_grads": True, "stochastic_rounding": True})
        for mine, theirs in zip(rows.lists, other.lists, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@FEW
@pytest.mark.parametrize("dtypes", [Dtypes(F32, F32, F32), Dtypes(BF16, BF16, BF16)], ids=str)
def test_a_cut_changes_no_bit(name: str, dtypes: Dtypes, device: torch.device, isa: str):
    whole = make_rows(dtypes, device, shapes=((4133,),))
    for cuts in ([1], [17, 18, 2055], [4096], list(range(5, 4133, 97))):
        cut, one = whole.clone(), whole.clone()
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, 4133], strict=True)]
        pieces = [[t for x in column for t in x.split(sizes)] for column in cut.lists[:STEP]]
        take(
            name,
            Rows([*pieces, [cut.lists[STEP][0].clone() for _ in sizes]]),
            stochastic_rounding=True,
            offsets=[0, *cuts],
        )
        take(name, one, stochastic_rounding=True)
        for a, b in zip(one.lists[:STEP], cut.lists[:STEP], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), cuts[:3]


@FEW
@pytest.mark.cpu_only
def test_threads_and_instruction_sets_with_fused_multiply_add_agree_in_every_bit(name: str):
    results, before = [], torch.get_num_threads()
    try:
        for instructions in [n for n in library.isas() if n != "baseline"] or [None]:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                rows = make_rows(
                    DTYPES[0], torch.device("cpu"), shapes=((30001,), (5,), (50003,), (64,))
                )
                with library.use_isa(instructions) if instructions else torch.no_grad():
                    take(name, rows)
                results.append(rows.params)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_sign_of_lion(device: torch.device, isa: str):
    """Nothing moves where the sum is 0, whichever zero; a nan stays; the smallest numbers count as
    the largest."""
    tiny = 1e-30
    g = torch.tensor(
        [0.0, -0.0, tiny, -tiny, 3e38, -3e38, torch.nan, torch.inf, -torch.inf] * 5, device=device
    )
    p, m = torch.ones_like(g), torch.zeros_like(g)
    rows = Rows([[p], [g], [m], [], [], [], [], [torch.zeros((), device=device)]])
    take("lion", rows, lr=0.25, weight_decay=0.0)
    wanted = [1.0, 1.0, 0.75, 1.25, 0.75, 1.25, torch.nan, 0.75, 1.25] * 5
    assert torch.equal(p.nan_to_num(77.0), torch.tensor(wanted, device=device).nan_to_num(77.0))


@pytest.mark.cpu_only
def test_a_table_that_lacks_the_state_is_refused():
    rows = make_rows(DTYPES[0], torch.device("cpu"), shapes=((4,), (5,)))
    without = [[] if c in (EXP_AVG, EXP_AVG_SQ) else column for c, column in enumerate(rows.lists)]
    table, before = optimizer_table(*without), rows.clone()
    for name in ("momentum", "lion", "adagrad"):
        with pytest.raises(ERRORS, match=r"nothing in column|has 0 tensors|has shape \(0,\)"):
            CASES[name][1](table, **{**CASES[name][-1], **AROUND})
        with pytest.raises(ERRORS, match="has 0 tensors for 2 params"):
            take(name, Rows(without))
    assert all(torch.equal(a, b) for a, b in zip(rows.params, before.params, strict=True))
    CASES["sgd"][1](table, **{**CASES["sgd"][-1], **AROUND})
    assert not torch.equal(rows.params[0], before.params[0])


@pytest.mark.parametrize("name", RULES)
def test_the_samples_name_every_rule(name: str):
    assert hasattr(torch.ops.pyops, f"{name}_from_table_")


@EVERY
def test_the_comparison_sees_a_step_that_does_nothing(name: str, device: torch.device):
    rows = make_rows(DTYPES[0], device)
    before = rows.clone()
    for step in rows.lists[STEP]:
        step.add_(1)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_step(name, rows, before)
