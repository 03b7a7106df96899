"""attention against explicit scores in float64: values, lse and every gradient, whatever is seen,
added and dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.ops import attention as ops
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, BlockLayout
from tests.ops.attention.cases import explicit, explicit_scores, heads, state_at
from tests.ops.conftest import isa  # noqa: F401 - a fixture, found by name
from tests.tolerance import assert_close_to_reference

pytestmark = pytest.mark.cpu_only  # of CUDA: tests/ops/triton/interpret_attention.py

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compared(qkv: tuple[Tensor, ...], bias: AttentionBias | None = None, **kwargs: Any) -> None:
    """y, lse and the gradients of q, k, v, bias and table against `explicit` in float64, by the
    error of `explicit` in the dtype."""
    bias, dtype, device = bias or AttentionBias(), qkv[0].dtype, qkv[0].device
    learned = {n: getattr(bias, n) for n in ("scores", "table") if getattr(bias, n) is not None}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    B, T, H, K = qkv[0].shape
    generator = torch.Generator().manual_seed(5)
    seeds = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, kept).double()
        for shape, kept in (((B, T, H, K), dtype), ((B, H, T), wide))
    ]
    results: list[list[Tensor]] = []
    for call, cast in (
        (ops.attention_with_lse, None),
        (explicit, dtype),
        (explicit, torch.float64),
    ):
        leaves = [x.detach().to(cast or x.dtype).requires_grad_() for x in qkv]
        extra = {
            n: x.detach().to(cast if cast == torch.float64 else x.dtype).requires_grad_()
            for n, x in learned.items()
        }
        own = AttentionBias(**{**vars(bias), **extra})
        y, lse = call(*leaves, bias=own, **kwargs)
        finite = torch.where(lse == -torch.inf, 0.0, lse)
        grads = torch.autograd.grad(
            [y, finite],
            [*leaves, *extra.values()],
            [s.to(t.dtype) for s, t in zip(seeds, (y, lse), strict=True)],
        )
        results.append([y.detach(), lse.detach(), *grads])
    # A score is off by an eps of the sum of its terms, and so, relatively, is what is made of it.
    q, k, _ = (x.double().abs().transpose(1, 2) for x in qkv)
    terms = kwargs["scale"] * (q @ k.repeat_interleave(H // k.shape[1], dim=1).mT).max()
    rounded = effect_of_rounding(qkv, bias, seeds[0], results[2][0], **kwargs)
    for n, (actual, plain, exact) in enumerate(zip(*results, strict=True)):
        largest = exact[exact.isfinite()].abs().max()
        assert largest > 0, n
        eps = torch.finfo(actual.dtype).eps
        tiny = eps * exact.abs() + torch.finfo(wide).eps * terms * largest + rounded.get(n, 0.0)
        if actual.dtype == torch.float64:  # `exact` has the same precision, and is off as far
            tiny = 2 * tiny
        assert_close_to_reference(actual, plain.to(actual.dtype), exact, tiny=tiny)


def effect_of_rounding(
    qkv: tuple[Tensor, ...],
    bias: AttentionBias,
    dy: Tensor,
    y: Tensor,
    *,
    scale: float,
    mask: AttentionMask,
    soft_cap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> dict[int, Tensor]:
    """How far dq, dk and dbias (results 2, 3 and 5) may be off because y is kept for backward in
    its own dtype: the sum of dy y, which is off by an eps of its terms, goes into every dS."""
    q, k = (x.double() for x in qkv[:2])
    wide_bias = AttentionBias(
        **{n: x.double() if isinstance(x, Tensor) else x for n, x in vars(bias).items()}
    )
    scores = explicit_scores(q, k, scale=scale, mask=mask, bias=wide_bias, soft_cap=soft_cap)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    terms = (dy * y).abs().sum(-1).transpose(1, 2) * torch.finfo(qkv[0].dtype).eps
    ds = weights * terms[..., None]
    group = q.shape[2] // k.shape[2]
    dq = scale * ds @ k.abs().transpose(1, 2).repeat_interleave(group, dim=1)
    dk = scale * ds.mT @ q.abs().transpose(1, 2)
    found = {2: dq.transpose(1, 2), 3: dk.unflatten(1, (-1, group)).sum(2).transpose(1, 2)}
    if bias.scores is not None:
        found[5] = ds.sum_to_size(bias.scores.shape)
    return found


def qkv_of(
    B: int, T: int, S: int, H: int, G: int, K: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    q = heads(B, T, H, K, dtype=dtype, device=device, seed=1)
    k, v = (heads(B, S, G, K, dtype=dtype, device=device, seed=s) for s in (2, 3))
    return q, k, v


def documents_of(lengths: list[int], device: torch.device) -> Tensor:
    """int32 [n] of documents 0, 1, ...; a negative length is padding."""
    ids = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)]
    return torch.cat(ids).int().to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "S", "G", "K"),
    [(5, 7, 1, 32), (65, 130, 2, 80), (67, 67, 4, 64), (1, 90, 2, 128), (64, 64, 4, 20)],
    ids=str,
)
def test_everything_seen(
    T: int,
    S: int,
    G: int,
    K: int,
    dtype: torch.dtype,
    device: torch.device,
    isa: str,  # noqa: F811
):
    compared(qkv_of(2, T, S, 4, G, K, dtype, device), scale=0.3, mask=AttentionMask())


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [32, 64, 80, 128])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (63, 65), (129, 191), (200, 100)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_grid_of_shapes(
    T: int,
    S: int,
    G: int,
    K: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    isa: str,  # noqa: F811
):
    compared(qkv_of(2, T, S, 4, G, K, dtype, device), scale=0.3, mask=AttentionMask(causal=causal))


def masks(device: torch.device) -> dict[str, tuple[int, int, AttentionMask]]:
    """Name: (T, S, mask), for B = 2 and H = 4."""
    keys = torch.ones(2, 130, dtype=torch.bool, device=device)
    keys[0, 70:] = keys[1, 3:66] = False
    packed = torch.stack(
        [documents_of([30, 70, 50, -10], device), documents_of([-5, 64, 64, 27], device)]
    )
    mixed = torch.arange(160, device=device).mul(7).remainder(5).int().expand(2, 160) - 1
    visible = torch.rand(4, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    visible[:, 1] = False
    visible[:, 2] = True
    layouts = {
        block: BlockLayout.from_dense(
            visible[:heads, : -(-150 // block)][..., : -(-140 // block)].to(device)
            if block > 16
            else (torch.rand(1, 10, 9, generator=torch.Generator().manual_seed(4)) < 0.4).to(
                device
            ),
            block=block,
            num_queries=150,
            num_keys=140,
            causal=block == 48,
        )
        for block, heads in ((64, 4), (48, 4), (16, 1))
    }
    zigzag = torch.cat([torch.arange(0, 40), torch.arange(200, 240)]).to(device)
    striped = torch.arange(0, 240, 3, device=device)
    return {
        "causal": (150, 150, AttentionMask(causal=True)),
        "causal and longer": (70, 200, AttentionMask(causal=True)),
        "window": (200, 200, AttentionMask(window=(20, 3))),
        "half a window": (200, 150, AttentionMask(causal=True, window=(70, None))),
        "after alone": (90, 200, AttentionMask(window=(None, 5))),
        "keys": (90, 130, AttentionMask(keys=keys)),
        "documents": (160, 160, AttentionMask(documents=packed)),
        "causal documents": (160, 160, AttentionMask(causal=True, documents=packed)),
        "documents in any order": (160, 160, AttentionMask(documents=mixed)),
        "documents of both": (64, 160, AttentionMask(documents=(packed[:, 20:84], packed))),
        "zigzag": (80, 240, AttentionMask(causal=True, places=(zigzag, torch.arange(240)))),
        "striped": (
            80,
            80,
            AttentionMask(causal=True, window=(90, None), places=(striped, zigzag)),
        ),
        "layout of 64": (150, 140, AttentionMask(layout=layouts[64])),
        "causal layout of 48": (150, 140, AttentionMask(layout=layouts[48])),
        "layout of 16, window": (150, 140, AttentionMask(layout=layouts[16], window=(50, 60))),
    }


@pytest.mark.parametrize("name", list(masks(torch.device("cpu"))))
def test_what_is_seen(name: str, device: torch.device, isa: str):  # noqa: F811
    T, S, mask = masks(device)[name]
    if mask.places is not None:
        mask = AttentionMask(**{**vars(mask), "places": tuple(p.to(device) for p in mask.places)})
    compared(qkv_of(2, T, S, 4, 2, 32, torch.float32, device), scale=0.25, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 70, 130),
        (1, 4, 70, 130),
        (2, 1, 70, 130),
        (1, 1, 70, 130),
        (2, 1, 1, 130),
        (70, 130),
        (4, 70, 1),
        (1,),
    ],
    ids=str,
)
def test_a_bias_of_any_shape(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    isa: str,  # noqa: F811
):
    generator = torch.Generator().manual_seed(8)
    bias = torch.randn(shape, generator=generator).to(device, dtype)
    compared(
        qkv_of(2, 70, 130, 4, 2, 32, dtype, device),
        AttentionBias(scores=bias),
        scale=0.2,
        mask=AttentionMask(window=(60, 50)),
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("places", [False, True])
def test_biases_by_distance(
    bidirectional: bool,
    places: bool,
    device: torch.device,
    isa: str,  # noqa: F811
):
    generator = torch.Generator().manual_seed(9)
    bias = AttentionBias(
        table=torch.randn(12, 4, generator=generator).to(device),
        max_distance=50,
        bidirectional=bidirectional,
        slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device),
    )
    chosen = (torch.arange(0, 450, 3), torch.arange(200).roll(70)) if places else None
    mask = AttentionMask(
        causal=not bidirectional, places=chosen and tuple(p.to(device) for p in chosen)
    )
    compared(qkv_of(2, 150, 200, 4, 4, 32, torch.float32, device), bias, scale=0.2, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(cap: float, dtype: torch.dtype, device: torch.device, isa: str):  # noqa: F811
    compared(
        qkv_of(1, 70, 90, 2, 1, 32, dtype, device),
        AttentionBias(scores=torch.randn(70, 90, device=device, dtype=dtype)),
        scale=0.2,
        mask=AttentionMask(causal=True),
        soft_cap=cap,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("S", "offset"), [(130, 3), (67, 0), (64, 1 << 34)], ids=str)
def test_dropout(
    S: int,
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    isa: str,  # noqa: F811
):
    """Rows whose first counter is no multiple of 4, and counters beyond 32 bits."""
    compared(
        qkv_of(2, 70, S, 4, 2, 32, dtype, device),
        AttentionBias(scores=torch.randn(4, 1, S, device=device, dtype=dtype)),
        scale=0.2,
        mask=AttentionMask(causal=True),
        dropout=AttentionDropout(0.3, state_at(offset, device)),
    )


@pytest.mark.parametrize("striped", [False, True])
def test_dropout_by_places_of_a_whole(striped: bool, device: torch.device, isa: str):  # noqa: F811
    places = torch.arange(50, 200, 2) if striped else torch.arange(97, 172)
    mask = AttentionMask(causal=True, places=(places.to(device), places.flip(0).to(device)))
    dropout = AttentionDropout(
        0.4,
        state_at(5, device),
        first_row=1,
        first_head=2,
        num_heads=7,
        num_queries=201,
        num_keys=203,
    )
    compared(
        qkv_of(2, 75, 75, 4, 2, 32, torch.float32, device), scale=0.2, mask=mask, dropout=dropout
    )
