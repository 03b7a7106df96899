"""Attention a few queries at a time, which answers on devices without a kernel: the reference's
results, from tensors that are no longer than its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyops.ops.attention import (
    AttentionBias,
    AttentionDropout,
    AttentionMask,
    BlockLayout,
    attention_backward_reference,
    attention_forward_reference,
    reference,
)
from pyops.ops.attention.operands import operands_of, options_of
from tests.ops.attention.cases import heads, state_at

pytestmark = pytest.mark.cpu_only

B, T, S, H, G, K = 2, 50, 70, 4, 2, 8
CPU = torch.device("cpu")
PART = reference.PART


def qkv(dtype: torch.dtype, T: int = T, S: int = S) -> list[Tensor]:
    sizes = ((T, H), (S, G), (S, G))
    return [heads(B, n, h, K, dtype=dtype, device=CPU, seed=i) for i, (n, h) in enumerate(sizes)]


def results(
    functions: tuple[Any, Any], given: list[Tensor], operands: Any, options: dict[str, Any]
) -> list[Tensor]:
    forward, backward = functions
    y, lse = forward(*given, *operands, **options)
    dy = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y.dtype)
    dlse = torch.sin(torch.arange(lse.numel(), dtype=torch.float64)).view(lse.shape).to(lse.dtype)
    wanted = {"bias_grad": True, "table_grad": True}
    return [y, lse, *backward(dy, dlse, y, lse, *given, *operands, **wanted, **options)]


WHOLE = (attention_forward_reference, attention_backward_reference)


def registered() -> tuple[Any, Any]:
    """What the dispatcher takes for a device without a kernel."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return tuple(  # type: ignore[return-value]
        lambda *args, op=op, **kwargs: op.default._op_dk(key, *args, **kwargs)
        for op in (torch.ops.pyops.attention_forward, torch.ops.pyops.attention_backward)
    )


def layout() -> BlockLayout:
    blocks = torch.rand(H, 4, 5, generator=torch.Generator().manual_seed(4)) < 0.5
    return BlockLayout.from_dense(blocks, block=16, num_queries=T, num_keys=S)


def cases() -> dict[str, tuple[AttentionMask, AttentionBias, AttentionDropout | None]]:
    ids = [torch.arange(n).div(17, rounding_mode="floor").int().expand(B, n) for n in (T, S)]
    table = AttentionBias(table=torch.randn(6, H, dtype=torch.float64), max_distance=9)
    slopes = AttentionBias(slopes=torch.rand(H, dtype=torch.float64))
    scores, shared = (
        AttentionBias(scores=torch.randn(shape, dtype=torch.float64))
        for shape in ((1, H, T, S), (B, 1, 1, S))
    )
    drops = AttentionDropout(0.4, state_at(3), first_row=1, num_queries=T + 5)
    places = (torch.arange(T) * 2, torch.arange(S).flip(0))
    return {
        "causal, a bias of all": (AttentionMask(causal=True), scores, None),
        "layout, dropout": (AttentionMask(layout=layout()), AttentionBias(), drops),
        "documents, a bias of keys": (AttentionMask(documents=(ids[0], ids[1])), shared, None),
        "places, by distance": (AttentionMask(causal=True, places=places), table, drops),
        "window, slopes": (AttentionMask(window=(9, 4)), slopes, None),
    }


@pytest.mark.parametrize("name", cases())
def test_parts_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    mask, bias, dropout = cases()[name]
    given = qkv(torch.float64)
    operands = operands_of(given[0], given[1], mask, bias, dropout)
    options = options_of(given[0], given[1], mask, dropout, scale=0.3, soft_cap=5.0)._asdict()
    expected = results(WHOLE, given, operands, options)
    assert all(bool(x.any()) for x in expected if x.numel())
    for queries in (7, 16, 1000):
        monkeypatch.setattr(reference, "PART", queries * B * H * S)
        found = results(registered(), given, operands, options)
        for ours, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-13)


def test_sums_over_parts_are_rounded_once(monkeypatch: pytest.MonkeyPatch):
    """bfloat16, a query at a time: dk, dv and the gradient of a bias that queries share are as near
    to float64 as those of the whole are. Rounded after each part they are ten times as far."""
    torch.manual_seed(0)
    bias = torch.randn(1, 1, 1, S).bfloat16()
    narrow = qkv(torch.bfloat16)
    found = []
    for functions, given, part in (
        (WHOLE, [x.double() for x in narrow], PART),
        (WHOLE, narrow, PART),
        (registered(), narrow, 1),
    ):
        monkeypatch.setattr(reference, "PART", part)
        own = AttentionBias(scores=bias.to(given[0].dtype))
        operands = operands_of(given[0], given[1], AttentionMask(), own, None)
        options = options_of(given[0], given[1], AttentionMask(), None, scale=0.3, soft_cap=None)
        found.append(results(functions, given, operands, options._asdict()))
    for n in (3, 4, 5):
        exact, *narrow = (each[n].double() for each in found)
        assert found[2][n].dtype == torch.bfloat16
        whole, parts = (float((x - exact).norm() / exact.norm()) for x in narrow)
        assert 1e-3 < whole < 1e-2
        assert parts <= 1.1 * whole, n


class Largest(TorchDispatchMode):
    """The most elements of any result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_no_tensor_of_queries_x_keys(monkeypatch: pytest.MonkeyPatch):
    long = 256
    given = qkv(torch.float32, long, long)
    mask = AttentionMask(causal=True)
    operands = operands_of(given[0], given[1], mask, AttentionBias(), None)
    options = options_of(given[0], given[1], mask, None, scale=0.3, soft_cap=None)._asdict()
    found = {}
    for queries in (8, long):
        monkeypatch.setattr(reference, "PART", queries * B * H * long)
        with Largest() as largest:
            results(registered(), given, operands, options)
        found[queries] = largest.numel
    assert found[long] == B * H * long * long
    assert found[8] == max(8 * B * H * long, given[0].numel())


def test_nothing_to_do():
    for sizes in ((0, 5), (5, 0)):
        given = qkv(torch.float32, *sizes)
        operands = operands_of(given[0], given[1], AttentionMask(), AttentionBias(), None)
        options = options_of(given[0], given[1], AttentionMask(), None, scale=0.3, soft_cap=None)
        found = results(registered(), given, operands, options._asdict())
        expected = results(WHOLE, given, operands, options._asdict())
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert not any(bool(x.any()) for n, x in enumerate(found) if n != 1)
