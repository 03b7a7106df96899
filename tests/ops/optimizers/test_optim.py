"""Adam against torch.optim in float64, element by element, for every mix of dtypes and every
option."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import library
from pyops.ops.optimizers import optim
from pyops.ops.optimizers.table import optimizer_table
from tests.ops.optimizers.adam_rows import LISTS, Dtypes, Rows, make_rows, torch_step
from tests.ops.samples import ADAM_SCALARS
from tests.tolerance import assert_close_to_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [
    Dtypes(F32, F32, F32),
    Dtypes(F32, F32, F32, copy=BF16),
    Dtypes(F32, BF16, F32),
    Dtypes(F32, BF16, F32, copy=BF16),
    Dtypes(BF16, BF16, BF16),
    Dtypes(BF16, BF16, F32),
    Dtypes(BF16, BF16, F32, master=F32),
    Dtypes(BF16, F32, F32, master=F32),
    Dtypes(F16, F16, F16),
    Dtypes(F16, F16, F32, copy=BF16),
    Dtypes(F16, F32, BF16, copy=F16),
    Dtypes(BF16, F16, F16, master=F16, copy=F32),
    Dtypes(F32, F16, BF16, copy=F16),
    Dtypes(BF16, BF16, F32, master=F32, copy=F16),
    Dtypes(F32, F32, BF16),
    Dtypes(F16, BF16, F32, master=BF16),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"decoupled": False},
    {"amsgrad": True, "lr": 0.02},
    {"amsgrad": True, "decoupled": False, "maximize": True},
    {"maximize": True, "zero_grads": True, "weight_decay": 0.0},
    {"decoupled": False, "zero_grads": True, "eps": 1e-8},
]
ERRORS = (RuntimeError, ValueError)


def assert_step(rows: Rows, before: Rows, *, factor: float = 1.0) -> None:
    """`rows` is `before` after one right step, judged by torch.optim in float64 and in float32."""
    exact, plain = (
        torch_step(before, torch.float64, factor=factor),
        torch_step(before, torch.float32, factor=factor),
    )
    params, grads, exp_avgs, exp_avg_sqs, largest, masters, copies, steps = rows.lists
    for actual, x, p in zip(
        [masters or params, exp_avgs, exp_avg_sqs, largest], exact, plain, strict=True
    ):
        for a, b, c in zip(actual, x, p, strict=True):
            # One more rounding of fp32 at the size of the operands, which may cancel.
            tiny = torch.finfo(a.dtype).eps * b.abs() + torch.finfo(F32).eps * 4
            assert_close_to_reference(a, c.to(a.dtype), b, tiny=tiny)
    for i, param in enumerate(params):
        assert steps[i].item() == before.lists[7][i].item() + 1
        if masters:
            assert torch.equal(param, masters[i].to(param.dtype))
        if copies:
            assert torch.equal(copies[i], param.to(copies[i].dtype))
        zeroed = rows.options.get("zero_grads", False)
        assert torch.equal(grads[i], torch.zeros_like(grads[i]) if zeroed else before.lists[1][i])


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_against_torch_in_float64(dtypes: Dtypes, device: torch.device, isa: str):
    for options in OPTIONS:
        rows = make_rows(dtypes, device, **options)
        before = rows.clone()
        rows.step()
        assert_step(rows, before)
        assert not torch.equal(rows.params[5], before.params[5])


def test_device_scalars(device: torch.device, isa: str):
    """lr_tensor stands in for lr, in fp32 or float64; grad_factor multiplies the gradient; neither
    is changed."""
    for lr in (
        torch.tensor(0.04, dtype=torch.float64, device=device),
        torch.tensor(0.04, device=device),
    ):
        rows = make_rows(DTYPES[6], device)
        before, factor = rows.clone(), torch.tensor(0.37, device=device)
        rows.step(lr, factor, torch.zeros(1, device=device), lr=123.0)
        before.options["lr"] = lr.item()
        assert_step(rows, before, factor=factor.item())
        assert factor.item() == pytest.approx(0.37)


@pytest.mark.parametrize("zero_grads", [False, True])
def test_found_inf_changes_nothing_but_zeroed_gradients(
    zero_grads: bool, device: torch.device, isa: str
):
    rows = make_rows(DTYPES[13], device, amsgrad=True, zero_grads=zero_grads)
    before = rows.clone()
    rows.step(None, None, torch.ones((), device=device))
    for name, now, then in zip([*LISTS, "steps"], rows.lists, before.lists, strict=True):
        for a, b in zip(now, then, strict=True):
            assert torch.equal(a, torch.zeros_like(b) if zero_grads and name == "grads" else b), (
                name
            )


def test_optional_tensors_row_by_row(device: torch.device, isa: str):
    """A tensor without elements means none for this parameter: a master for one row, a copy for
    another."""
    rows = make_rows(
        Dtypes(BF16, BF16, F32, master=F32, copy=F16),
        device,
        amsgrad=True,
        shapes=((40,), (41,), (42,)),
    )
    none, apart = torch.empty(0, device=device), rows.clone()
    for column, row in ((5, 1), (6, 0), (4, 2)):
        rows.lists[column][row] = none
    rows.step()
    for i in range(3):
        single = Rows(
            [
                [group[i]] if group and rows.lists[c][i].numel() else []
                for c, group in enumerate(apart.lists)
            ]
        )
        single.step()
        for column, group in enumerate(single.lists):
            assert not group or torch.equal(group[0], rows.lists[column][i])


def test_many_steps_follow_torch(device: torch.device, isa: str):
    """Twenty steps from zero state, so that a bias correction that is late by a step shows."""
    x, rows = torch.randn(50, device=device), make_rows(DTYPES[0], device, shapes=((50,),))
    rows.lists[0][0], rows.lists[2][0], rows.lists[3][0], rows.lists[7][0] = (
        x.clone(),
        torch.zeros_like(x),
        torch.zeros_like(x),
        torch.zeros((), device=device),
    )
    parameter = x.double().requires_grad_()
    reference = torch.optim.AdamW(
        [parameter], lr=0.03, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2
    )
    for i in range(20):
        parameter.grad = torch.cos(torch.arange(50, device=device).double() * (i + 1))
        rows.lists[1][0] = parameter.grad.float()
        reference.step()
        rows.step()
    torch.testing.assert_close(rows.params[0].double(), parameter.detach(), rtol=0.0, atol=2e-6)


def test_from_table_gives_the_same_bits(device: torch.device, isa: str):
    for dtypes in DTYPES:
        rows = make_rows(dtypes, device, amsgrad=True, zero_grads=True, stochastic_rounding=True)
        other, offsets = rows.clone(), [100 * i for i in range(len(rows.params))]
        rows.step(offsets=offsets)
        table = optimizer_table(*other.lists, offsets)
        other.step(
            function=lambda *a, offsets, table=table, **k: optim.adam_from_table_(
                table, *a[8:], **k
            )
        )
        for mine, theirs in zip(rows.lists, other.lists, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[4]], ids=str)
def test_threads_change_no_bit_and_nothing_beside(dtypes: Dtypes, isa: str):
    """Rows large enough to be cut among threads, with stochastic rounding; the first in a guarded
    piece of memory."""
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows = make_rows(
                dtypes, torch.device("cpu"), shapes=((30001,), (5,), (50003,), (0,), (64,))
            )
            guard = torch.full((30001 + 32,), 5.0, dtype=dtypes.param)
            guard[16:-16] = rows.params[0]
            rows.lists[0][0] = guard[16:-16]
            rows.step(stochastic_rounding=True)
            assert guard[:16].unique().tolist() == guard[-16:].unique().tolist() == [5.0]
            results.append(rows.params)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nan_and_inf_stay_where_they_are(device: torch.device, isa: str):
    for dtypes in (DTYPES[0], DTYPES[4], DTYPES[6]):
        rows = make_rows(dtypes, device, amsgrad=dtypes is DTYPES[0], shapes=((100,),))
        rows.lists[1][0][[3, 50]] = torch.tensor([torch.nan, torch.inf], device=device).to(
            dtypes.grad
        )
        rows.step()
        assert rows.params[0].isnan().nonzero().flatten().tolist() == [3, 50]
        assert rows.lists[3][0].isfinite().sum() == 98


def compiled(rows: Rows) -> None:
    def step(lists: list[list[Tensor]]) -> Tensor:
        Rows(lists).step(zero_grads=True)
        return lists[0][0] * 2

    torch.compile(step, backend="aot_eager", fullgraph=True)(rows.lists)


@pytest.mark.real_device
def test_in_a_compiled_graph(device: torch.device):
    rows = make_rows(Dtypes(BF16, BF16, F32, master=F32), device, shapes=((20,), (5, 4)))
    eager = rows.clone()
    eager.step(zero_grads=True)
    compiled(rows)
    for mine, theirs in zip(rows.lists, eager.lists, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def spoil(column: int, tensor: Tensor) -> Rows:
    rows = make_rows(DTYPES[0], tensor.device, amsgrad=True, shapes=((4, 8), (4, 8)))
    rows.lists[column][1] = tensor
    return rows


def test_what_does_not_fit_raises_before_anything_is_changed(device: torch.device):
    wide = torch.randn(4, 16, device=device)
    cases = [
        (spoil(0, wide[:, :8]), r"params\[1\].*gaps or overlaps"),
        (spoil(0, torch.randn(1, 8, device=device).expand(4, 8)), r"params\[1\].*gaps or overlaps"),
        (spoil(1, torch.randn(4, 8, device=device)), r"grads\[1\].*laid out alike"),
        (spoil(2, torch.randn(8, 4, device=device).t()[:, :7]), r"exp_avgs\[1\].*laid out alike"),
        (
            spoil(3, torch.randn(4, 8, device=device).t().contiguous().t().half()),
            r"exp_avg_sqs\[1\].*dtype",
        ),
        (
            spoil(1, torch.randn(4, 8, device=device).t().contiguous().t().double()),
            r"grads\[1\] must be float32",
        ),
        (spoil(7, torch.zeros(2, device=device)), r"steps\[1\] must be one float32"),
        (
            spoil(7, torch.zeros((), device=device, dtype=torch.int64)),
            r"steps\[1\] must be one float32",
        ),
    ]
    for rows, words in cases:
        before = rows.clone()
        with pytest.raises(ERRORS, match=words):
            rows.step()
        with pytest.raises(ERRORS, match=words):
            optimizer_table(*rows.lists)
        for now, then in zip(rows.lists, before.lists, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    assert wide.isfinite().all()


def test_lists_and_scalars_that_do_not_fit(device: torch.device):
    rows = make_rows(DTYPES[0], device, shapes=((4,), (5,)))
    with pytest.raises(ERRORS, match="offsets has 1 numbers for 2 params"):
        rows.step(offsets=[3])
    with pytest.raises(ERRORS, match="grad_factor must be one float32"):
        rows.step(None, torch.ones(2, device=device))
    with pytest.raises(ERRORS, match="grads has 1 tensors for 2 params"):
        Rows([group[:1] if i == 1 else group for i, group in enumerate(rows.lists)]).step()
    with pytest.raises(ERRORS, match="optimizer_table"):
        Rows(rows.lists).step(
            function=lambda *a, offsets, **k: optim.adam_from_table_(
                torch.zeros(2, 3, device=device), **k
            )
        )


@pytest.mark.parametrize("column", [2, 3])
def test_a_table_of_another_rule_is_refused(column: int, device: torch.device):
    """Tables may lack moments (SGD has none); Adam must not follow an address that is not there."""
    rows = make_rows(DTYPES[0], device, shapes=((4,), (5,)))
    rows.lists[column] = []
    with pytest.raises(ERRORS, match=r"exp_avg.* has 0 tensors for 2 params"):
        rows.step()
    table, before = optimizer_table(*rows.lists), rows.clone()
    assert int(table[1, 5 - column]) == rows.lists[5 - column][1].data_ptr()
    step = partial(optim.adam_from_table_, table, **{**ADAM_SCALARS, "zero_grads": False})
    if device.type == "cpu":
        with pytest.raises(ERRORS, match=rf"column {column}|has 0 tensors|exp_avg"):
            step()
    else:  # it can't be looked into from the host: its rows are passed over
        step()
    assert all(torch.equal(a, b) for a, b in zip(rows.params, before.params, strict=True))


@pytest.mark.skipif(not library.isas(), reason="needs kernels")
def test_the_test_sees_a_step_that_does_nothing(device: torch.device):
    rows = make_rows(DTYPES[0], device)
    before = rows.clone()
    for step in rows.lists[7]:
        step.add_(1)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_step(rows, before)
