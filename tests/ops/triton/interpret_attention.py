"""The Triton kernels of the stem `attention`, run by the interpreter on CPU tensors; see
test_interpreter.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops.attention import (
    AttentionBias,
    AttentionDropout,
    AttentionMask,
    BlockLayout,
    attention_backward_reference,
    attention_forward_reference,
)
from pyops.ops.attention.operands import operands_of, options_of
from pyops.ops.triton import attention as kernels
from tests.grids import cut, full
from tests.ops.attention.cases import heads, state_at

CPU = torch.device("cpu")
# The interpreter has no products of bfloat16
ERRORS = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 1e-3}
LATE = torch.arange(0, 90, 2)  # places


def qkv_of(T: int, S: int, K: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One row, two heads in a group."""
    return [
        heads(1, n, h, K, dtype=dtype, device=CPU, seed=i)
        for i, (n, h) in enumerate(((T, 2), (S, 1), (S, 1)))
    ]


def compared(
    qkv: list[Tensor],
    mask: AttentionMask | None = None,
    bias: AttentionBias | None = None,
    dropout: AttentionDropout | None = None,
    soft_cap: float | None = None,
) -> list[Tensor]:
    """All results of the kernels, which must be those of the reference in float64, by their
    norm."""
    q = qkv[0]
    mask, bias = mask or AttentionMask(), bias or AttentionBias()
    found: list[list[Tensor]] = []
    for forward, backward, dtype in (
        (kernels.attention_forward, kernels.attention_backward, q.dtype),
        (attention_forward_reference, attention_backward_reference, torch.float64),
    ):
        own = [x.to(dtype) for x in qkv]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        added = AttentionBias(
            **{n: x.to(wide) if isinstance(x, Tensor) else x for n, x in vars(bias).items()}
        )
        operands = operands_of(own[0], own[1], mask, added, dropout)
        options: dict[str, Any] = options_of(
            own[0], own[1], mask, dropout, scale=0.3, soft_cap=soft_cap
        )._asdict()
        y, lse = forward(*own, *operands, **options)
        dy = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(q.dtype)
        dlse = torch.sin(torch.arange(lse.numel(), dtype=torch.float64)).view(lse.shape)
        grads = backward(
            dy.to(dtype),
            dlse.to(wide),
            y,
            lse,
            *own,
            *operands,
            bias_grad=True,
            table_grad=True,
            **options,
        )
        assert [x.dtype for x in grads[:3]] == [dtype] * 3
        found.append([y, lse, *grads])
    for n, (ours, exact) in enumerate(zip(*found, strict=True)):
        assert ours.shape == exact.shape, n
        finite = exact.isfinite()
        assert torch.equal(ours.isfinite(), finite), n
        error = (ours.double() - exact)[finite].norm()
        assert error <= ERRORS[q.dtype] * exact[finite].norm(), (n, float(error))
    nothing = (found[1][1] == -torch.inf).mT  # seen
    assert not any(bool(found[0][n][nothing].any()) for n in (0, 2))
    return found[0]


def test_half_precision():
    compared(qkv_of(70, 70, 20, torch.float16), AttentionMask(causal=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
def test_everything_seen(dtype: torch.dtype):
    compared(qkv_of(37, 70, 20, dtype))
    compared(qkv_of(64, 64, 64, dtype), AttentionMask(causal=True))
    several = [torch.cat([x, 2 * x], dim=2) for x in qkv_of(40, 50, dtype=dtype)]
    compared(several, AttentionMask(causal=True))  # two groups of two heads


def layout(block: int, num_heads: int, *, causal: bool) -> tuple[int, int, AttentionMask]:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.rand(num_heads, -(-90 // block), -(-80 // block), generator=generator) < 0.6
    made = BlockLayout.from_dense(blocks, block=block, num_queries=90, num_keys=80, causal=causal)
    return 90, 80, AttentionMask(layout=made, window=None if block == 48 else (50, None))


def masks() -> dict[str, tuple[int, int, AttentionMask]]:
    ids = torch.tensor([0] * 20 + [1] * 35 + [-1] * 5 + [7] * 10, dtype=torch.int32)[None]
    keys = torch.ones(1, 70, dtype=torch.bool)
    keys[:, 20:50] = False  # not the padding
    order = torch.arange(70).mul(7).remainder(5).int()[None] - 1
    return {
        "causal and longer": (40, 90, AttentionMask(causal=True)),
        "causal and shorter": (90, 40, AttentionMask(causal=True)),
        "window": (90, 90, AttentionMask(window=(20, 3))),
        "long window": (110, 110, AttentionMask(causal=True, window=(70, None))),
        "after alone": (50, 90, AttentionMask(window=(None, 20))),
        "keys": (40, 70, AttentionMask(keys=keys)),
        "documents": (70, 70, AttentionMask(causal=True, documents=ids, keys=keys)),
        "documents in any order": (70, 70, AttentionMask(documents=order)),
        "places": (45, 90, AttentionMask(causal=True, places=(LATE, torch.arange(90).flip(0)))),
        "layout of 16": layout(16, 1, causal=True),
        "layout of 48": layout(48, 2, causal=False),
        "layout of 128": layout(128, 2, causal=True),
    }


# What is causal and longer stands beside a bias of any shape.
IN_SUITE = ("window", "documents", "layout of 48")


@pytest.mark.parametrize("name", cut([(n,) for n in masks()], keep=[(n,) for n in IN_SUITE]))
def test_what_is_seen(name: str):
    T, S, mask = masks()[name]
    compared(qkv_of(T, S), mask)


SHAPES = [(1, 2, 40, 70), (1, 1, 40, 70), (1, 2, 1, 70), (1, 1, 1, 70)]


@pytest.mark.parametrize("shape", cut([(s,) for s in SHAPES], keep=[((1, 1, 40, 70),)]), ids=str)
def test_a_bias_of_any_shape(shape: tuple[int, ...]):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    compared(qkv_of(40, 70), AttentionMask(causal=True), AttentionBias(scores=bias))


@pytest.mark.full
def test_a_bias_that_rows_share():
    qkv = [torch.cat([x, 2 * x, x - 1]) for x in qkv_of(40, 50)]
    bias = torch.randn(1, 2, 40, 50, generator=torch.Generator().manual_seed(8))
    compared(qkv, None, AttentionBias(scores=bias))


@pytest.mark.parametrize(("bidirectional", "places"), [(True, True), full(False, False)])
def test_biases_by_distance_and_a_soft_cap(bidirectional: bool, places: bool):
    bias = AttentionBias(
        table=torch.randn(6, 2, generator=torch.Generator().manual_seed(9)),
        max_distance=20,
        bidirectional=bidirectional,
        slopes=torch.tensor([0.1, 0.2]),
    )
    if places:
        mask = AttentionMask(causal=True, places=(LATE, torch.arange(90)))
        compared([x.double() for x in qkv_of(45, 90)], mask, bias, soft_cap=0.4)
    else:
        compared(qkv_of(45, 90), None, bias, soft_cap=1.5)


@pytest.mark.parametrize(
    ("T", "S", "offset"),
    [
        *((8, 24, n) for n in (4, 5, 6, 7)),
        *(full(40, 72, n) for n in (4, 5, 6, 7)),
        (40, 70, 1 << 34),
    ],
)
def test_dropout(T: int, S: int, offset: int):
    """Blocks of four words shared by four weights, shifted by each amount, or drawn one by one."""
    dropout = AttentionDropout(0.3, state_at(offset), first_row=2, first_head=3, num_heads=9)
    mask = AttentionMask(causal=T == 40)  # else each word of a block counts
    compared(qkv_of(T, S), mask, None, dropout)


@pytest.mark.full
def test_dropout_by_places():
    places = AttentionMask(causal=True, places=(LATE, torch.arange(90).flip(0)))
    state = AttentionDropout(0.4, state_at(5), num_queries=201, num_keys=204)
    compared(qkv_of(45, 90), places, None, state)


@pytest.mark.parametrize("bad", [torch.nan, full(torch.inf)])
def test_what_is_not_seen_never_reaches_a_result(bad: float):
    """Behind the mask, and later; a query that sees such a key has nan, and no other has."""
    T = 50
    keys = torch.ones(1, T, dtype=torch.bool)
    keys[:, 20:40] = False
    qkv = qkv_of(T, T)
    for mask, unseen, clean in (
        (AttentionMask(causal=True, keys=keys), slice(20, 40), T),
        (AttentionMask(causal=True), slice(45, T), 45),
    ):
        operands = operands_of(qkv[0], qkv[1], mask, AttentionBias(), None)
        options = options_of(qkv[0], qkv[1], mask, None, scale=0.3, soft_cap=None)._asdict()
        dirty = [qkv[0], *(x.clone() for x in qkv[1:])]
        for x in dirty[1:]:
            x[:, unseen] = bad
        found = []
        for given in (qkv, dirty):
            y, lse = kernels.attention_forward(*given, *operands, **options)
            dy = torch.ones_like(y)
            dy[:, clean:] = 0
            saved = (y.nan_to_num(0), lse.nan_to_num(0))
            dq, *_ = kernels.attention_backward(
                dy, None, *saved, *given, *operands, bias_grad=False, table_grad=False, **options
            )
            found.append((y[:, :clean], lse[:, :, :clean], dq[:, :clean]))
        for ours, expected in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_sizes_of_zero_and_strides():
    for T, S in ((0, 5), (5, 0)):
        found = compared(qkv_of(T, S))
        assert not any(bool(x.any()) for n, x in enumerate(found) if n != 1)
    packed = torch.randn(1, 20, 3, 2, 16, generator=torch.Generator().manual_seed(1))
    plain = compared([packed[:, :, i].contiguous() for i in range(3)])
    first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed.unbind(2)]
    gaps = [torch.stack([x, x], dim=-1)[..., 0] for x in packed.unbind(2)]
    for given in (list(packed.unbind(2)), first, gaps):
        for a, b in zip(plain, compared(given), strict=True):
            assert torch.equal(a, b)


def test_refusals():
    q, k, v = qkv_of(5, 6)
    operands = operands_of(q, k, AttentionMask(), AttentionBias(), None)
    options = options_of(q, k, AttentionMask(), None, scale=1.0, soft_cap=None)._asdict()
    with pytest.raises(ValueError, match="K up to 256"):
        kernels.attention_forward(q, k[:, :4], v, *operands, **options)
    bad = operands._replace(mask=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask must be \[1, 6\]"):
        kernels.attention_forward(q, k, v, *bad, **options)
    with pytest.raises(ValueError, match="bias must be"):
        kernels.attention_forward(
            q, k, v, *operands._replace(bias=torch.ones(1, 2, 5, 5)), **options
        )
