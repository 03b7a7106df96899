"""What a query does not see changes nothing for it, bit for bit, whatever says so; and no tensor of
queries x keys is made on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.host_heap import trim
from pyops.ops import attention as ops
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, BlockLayout
from tests.ops.attention.cases import seen_tokens, state_at
from tests.ops.attention.test_attention import masks, qkv_of
from tests.ops.conftest import isa  # noqa: F401 - a fixture, found by name

pytestmark = pytest.mark.cpu_only  # of CUDA: tests/ops/triton/interpret_attention.py


def of_query(t: int, qkv: list[Tensor], mask: AttentionMask, dy: Tensor) -> list[Tensor]:
    """y, lse and dq of query t."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    y, lse = ops.attention_with_lse(*leaves, mask=mask)
    (dq,) = torch.autograd.grad(y, leaves[0], dy)
    return [y[:, t].detach(), lse[:, :, t].detach(), dq[:, t]]


@pytest.mark.parametrize("name", list(masks(torch.device("cpu"))))
def test_keys_that_a_query_does_not_see(name: str, device: torch.device, isa: str):  # noqa: F811
    """Keys and values that no head of a group sees are replaced: by large numbers, with which no
    bit changes, and by nan and inf."""
    T, S, mask = masks(device)[name]
    qkv = list(qkv_of(2, T, S, 4, 2, 32, torch.float32, device))
    dy = torch.cos(torch.arange(qkv[0].numel(), device=device)).view(qkv[0].shape)
    seen = seen_tokens(qkv[0], qkv[1], mask).expand(2, 4, T, S)
    changed_any = False
    for t in (3, 37, 63, T - 2):
        expected = of_query(t, qkv, mask, dy)
        unseen = ~seen[:, :, t].unflatten(1, (2, 2)).any(dim=2).mT  # [B, S, G]
        changed_any |= bool(unseen.any())
        for value in (1e4, torch.nan, torch.inf):
            other = [x.clone() for x in qkv]
            for x in other[1:]:
                x[unseen] = value
            found = of_query(t, other, mask, dy)
            assert torch.equal(found[1], expected[1]), (t, value)
            for a, b in zip(found, expected, strict=True):
                if value == 1e4:
                    assert torch.equal(a, b), t
                else:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert changed_any


def test_rows_of_the_batch_lie_a_stride_apart(device: torch.device):
    """Row b draws from b * row_stride on, as alone from there."""
    q, k, v = qkv_of(3, 20, 30, 4, 2, 8, torch.float32, device)
    stride = 4 * 20 * 30 + 11
    whole = ops.attention(q, k, v, dropout=AttentionDropout(0.3, state_at(5), row_stride=stride))
    for b in range(3):
        alone = AttentionDropout(0.3, state_at(5 + b * stride))
        row = [x[b : b + 1] for x in (q, k, v)]
        assert torch.equal(ops.attention(*row, dropout=alone), whole[b : b + 1])
    close = ops.attention(q, k, v, dropout=AttentionDropout(0.3, state_at(5)))
    assert torch.equal(close[:1], whole[:1])
    assert not torch.equal(close[1:], whole[1:])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells")
def test_memory_is_linear_in_the_length():
    """T = 8192 with all that could take a table of queries x keys: less than twice the inputs."""
    T, H = 8192, 2
    ids = (torch.arange(T) // 3000).int()[None]
    near = torch.arange(T // 64)
    blocks = ((near[:, None] - near) % 64) < 4
    layout = BlockLayout.from_dense(blocks[None], block=64, num_queries=T, num_keys=T, causal=True)
    table = torch.zeros(32, H, requires_grad=True)

    def step(tokens: int) -> int:
        """Bytes of the inputs; the most that a step takes beside them goes to `peaks`."""
        qkv = [torch.full((1, tokens, H, 64), 0.1, requires_grad=True) for _ in range(3)]
        dy = torch.ones_like(qkv[0])
        hides: dict[str, Any] = {"documents": ids, "layout": layout} if tokens == T else {}
        trim()  # what earlier tests have freed would be taken again, and no growth be seen
        resident = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        y = ops.attention(
            *qkv,
            mask=AttentionMask(causal=True, **hides),
            bias=AttentionBias(table=table, slopes=torch.ones(H)),
            dropout=AttentionDropout(0.1, state_at(0)),
        )
        torch.autograd.grad(y, [*qkv, table], dy)
        peaks.append(status("VmHWM") - resident)
        return 4 * dy.numel() * dy.element_size()

    peaks: list[int] = []
    step(64)  # threads are started
    inputs = step(T)
    assert 0 < peaks[1] < 2 * inputs < T * T


def status(name: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) << 10
