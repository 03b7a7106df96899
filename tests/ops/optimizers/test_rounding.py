"""Stochastic rounding inside Adam: unbiased, reproducible, indifferent to shards, and bit for bit
its definition."""

from __future__ import annotations

import pytest
import torch

from pyops.ops.optimizers.step import round_stochastically
from tests.ops.optimizers.adam_rows import Dtypes, Rows, make_rows

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIXTEEN = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


def exact_rows(dtype: torch.dtype, device: torch.device, n: int) -> Rows:
    """Rows whose step is exact in fp32 up to the last rounding: m = g, v = g^2, p = p -+ lr, at
    step 5."""
    g = (torch.randint(1, 1 << 12, (n,), device=device) - 2048.5) * 2.0**-9
    p = torch.randint(-99, 100, (n,), device=device) * 2.0**-5
    options = {
        "beta1": 0.0,
        "beta2": 0.0,
        "eps": 0.0,
        "weight_decay": 0.0,
        "lr": 1.3 * 2.0**-9,
        "seed": -(1 << 62) + 12345,
    }
    zeros = torch.zeros(n, device=device, dtype=dtype)
    lists = [
        [p.to(dtype)],
        [g],
        [zeros.clone()],
        [zeros.clone()],
        [],
        [],
        [],
        [torch.tensor(4.0, device=device)],
    ]
    return Rows(lists, {**options, "stochastic_rounding": True})


@SIXTEEN
def test_bits_are_those_of_the_definition(dtype: torch.dtype, device: torch.device, isa: str):
    rows = exact_rows(dtype, device, 3001)
    p, g = rows.params[0].float(), rows.lists[1][0]
    rows.step(offsets=[(1 << 35) + 13])
    lr = torch.tensor(rows.options["lr"], device=device)
    for column, value, stream in ((0, p - lr * g.sign(), 0), (2, g, 1), (3, g * g, 2)):
        expected = round_stochastically(
            value, dtype, seed=rows.options["seed"], step=5, stream=stream, offset=(1 << 35) + 13
        )
        assert torch.equal(rows.lists[column][0], expected)
        assert not torch.equal(rows.lists[column][0], value.to(dtype)), "rounded to nearest"


@SIXTEEN
def test_definition_on_awkward_numbers(dtype: torch.dtype):
    """Neighbours only, exact numbers stay, signs agree; subnormals, overflow, inf and nan."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    x = torch.tensor(
        [
            0.0,
            1.0,
            -1.5,
            1.0001,
            -3.14159,
            tiny * 0.37,
            -tiny * 2.7,
            tiny / 2048,
            65519.0,
            -70000.0,
            torch.inf,
            -torch.inf,
            torch.nan,
        ]
    ).repeat(500)
    out = round_stochastically(x, dtype, seed=3, step=1, stream=0, offset=0)
    exact = x.to(dtype).float() == x
    assert torch.equal(out.float()[exact], x[exact])
    assert torch.equal(out.isnan(), x.isnan())
    finite = x.isfinite() & (x.abs() < info.max)
    nearest = x.to(dtype)
    spacing = (
        torch.nextafter(nearest.abs(), torch.tensor(torch.inf, dtype=dtype)) - nearest.abs()
    ).float()
    assert ((out.float() - x).abs() <= spacing)[finite].all()
    assert (out.float() * x >= 0)[finite].all()


@SIXTEEN
def test_unbiased(dtype: torch.dtype, device: torch.device, isa: str):
    """The mean of many roundings is the number: within five standard errors, for moments and
    parameter."""
    n = 200_000
    rows = make_rows(
        Dtypes(dtype, F32, dtype),
        device,
        shapes=((n,),),
        stochastic_rounding=True,
        beta1=0.5,
        beta2=0.5,
        weight_decay=0.0,
        eps=0.0,
        lr=0.0123,
    )
    for column, value in ((0, 1.5), (1, 0.7), (2, 0.0), (3, 0.0)):
        rows.lists[column][0].fill_(value)
    rows.lists[7][0].fill_(0.0)
    rows.step()
    for column, exact in ((2, 0.35), (3, 0.245), (0, 1.5 - 0.0123)):
        x = rows.lists[column][0].double()
        assert x.unique().numel() == 2
        spacing = (x.max() - x.min()).item()
        assert abs(x.mean().item() - exact) < 5 * 0.5 * spacing / n**0.5
        assert x.min().item() < exact < x.max().item()


@pytest.mark.parametrize("cut", [1, 7, 8, 1000, 1025, 2047])
def test_a_row_cut_in_shards_gives_the_same_bits(cut: int, device: torch.device, isa: str):
    dtypes, n = Dtypes(BF16, BF16, F16), 2500
    whole = make_rows(dtypes, device, shapes=((n,),), stochastic_rounding=True, amsgrad=True)
    shards = whole.clone()
    shards.lists = [
        [t for x in group for t in (x[:cut], x[cut:])] if i < 7 else [x.clone() for x in group * 2]
        for i, group in enumerate(shards.lists)
    ]
    whole.step(offsets=[1003])
    shards.step(offsets=[1003, 1003 + cut])
    for column in (0, 2, 3, 4):
        assert torch.equal(torch.cat(shards.lists[column]), whole.lists[column][0])


def test_bits_differ_by_seed_step_offset_and_stream(device: torch.device, isa: str):
    x = torch.full((4000,), 1.001, device=device)
    places = [{"seed": 1, "step": 1, "stream": 0, "offset": 0}]
    places += [
        {**places[0], **change}
        for change in ({"seed": 2}, {"step": 2}, {"stream": 1}, {"offset": 8})
    ]
    drawn = [round_stochastically(x, BF16, **place) for place in places]  # type: ignore[arg-type]
    for other in drawn[1:]:
        assert not torch.equal(drawn[0], other)
    rows = [exact_rows(BF16, device, 500) for _ in range(2)]
    rows[1].lists = [[t.clone() for t in group] for group in rows[0].lists]
    rows[0].step(seed=1)
    rows[1].step(seed=2)
    assert not torch.equal(rows[0].lists[2][0], rows[1].lists[2][0])


def test_masters_and_fp32_are_never_rounded_at_random(device: torch.device, isa: str):
    for dtypes in (Dtypes(BF16, F32, F32, master=F32), Dtypes(F32, BF16, F32)):
        rows = make_rows(dtypes, device)
        other = rows.clone()
        rows.step()
        other.step(stochastic_rounding=True)
        for mine, theirs in zip(rows.lists, other.lists, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
