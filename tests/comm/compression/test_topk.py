"""TopK: the largest numbers arrive exactly, the others wait in the error; nothing is lost between
ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.comm.compression.names import parse
from pyops.comm.compression.topk import TopK


def encoded(codec: TopK, x: Tensor, **options: Any) -> Tensor:
    payload = torch.full((codec.payload_bytes(x.numel()),), 77, dtype=torch.uint8)
    codec.encode(x, payload, **options)
    return payload


def decoded(
    codec: TopK, payload: Tensor, n: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full((n,), torch.nan, dtype=dtype)
    codec.decode(payload, out, scale=scale)
    return out


def test_literals():
    codec = TopK(0.5)
    error = torch.tensor([0.0, 1.0, 0.0, -0.25])
    payload = encoded(codec, torch.tensor([0.1, -4.0, 0.2, 0.5]), error=error)
    assert payload[:8].view(torch.int32).tolist() == [1, 3]
    assert payload[8:].view(torch.float32).tolist() == [-3.0, 0.25]
    assert error.tolist() == torch.tensor([0.1, 0.0, 0.2, 0.0]).tolist()
    assert decoded(codec, payload, 4, scale=2.0).tolist() == [0.0, -6.0, 0.0, 0.5]
    out = torch.empty(4)
    codec.sum_rows(out, [payload, encoded(codec, torch.tensor([8.0, 1.0, 0.0, 0.0]))], scale=0.5)
    assert out.tolist() == [4.0, -1.0, 0.0, 0.125]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 7, 63, 1_000, 70_001])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_what_is_sent_and_what_is_left_make_the_whole(n: int, ratio: float, dtype: torch.dtype):
    codec, error = TopK(ratio), torch.randn(n)
    x = torch.randn(n).to(dtype)
    u = x.float() + error
    flag = torch.zeros(1)
    out = decoded(codec, encoded(codec, x, error=error, flag=flag), n)
    assert codec.payload_bytes(n) == 8 * codec.kept(n)
    assert torch.equal(out + error, u), "exactly: a number is here or there"
    assert int((out != 0).sum()) == codec.kept(n) == -int(-ratio * n // 1)
    assert flag.item() == 0
    if 0 < codec.kept(n) < n:
        assert out[out != 0].abs().min() >= error.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives_as_nan_and_stays_out_of_the_error(bad: float):
    codec, x, error, flag = TopK(0.1), torch.randn(100), torch.randn(100), torch.zeros(1)
    x[37], before = bad, error.clone()
    out = decoded(codec, encoded(codec, x, error=error, flag=flag), 100)
    assert out[37].isnan()
    assert int(out.isfinite().sum()) == 99
    assert torch.equal(error, before)
    assert flag.item() == 1


def gradients(rank: int, steps: int, n: int) -> Tensor:
    return torch.randn(steps, n, generator=torch.Generator().manual_seed(rank))


def _reduce(rank: int, group: Any, n: int, steps: int, op: str) -> tuple[Tensor, ...]:
    codec, size = TopK(0.05), group.size()
    error = ErrorFeedback(n, codec=codec, rank=rank, size=size)
    total = torch.zeros(n).double()
    for row in gradients(rank, steps, n):
        out = compressed_all_reduce(
            row, codec=codec, error=error, group=group, op=op, segment_bytes=1024
        )
        total += out.double()
    return total, out, error.worker, error.server


@pytest.mark.parametrize(
    ("size", "n", "op"),
    [(1, 1000, "mean"), (2, 1, "mean"), (2, 3001, "sum"), (3, 5000, "mean"), (4, 777, "sum")],
)
def test_nothing_is_lost_between_ranks(world, size: int, n: int, op: str):
    steps = 20
    found = world(size).run(_reduce, n, steps, op) if size > 1 else [_alone(n, steps)]
    divisor = size if op == "mean" else 1
    given = sum(gradients(rank, steps, n).double().sum(dim=0) for rank in range(size)) / divisor
    workers = sum(worker.double() for *_, worker, _ in found) / divisor
    servers = torch.cat([server.double() for *_, server in found])
    torch.testing.assert_close(
        found[0][0] + workers + servers, given, rtol=0, atol=steps * size * 2.0**-24 * 16
    )
    assert all(torch.equal(total, found[0][0]) for total, *_ in found)
    if n > 100:
        assert workers.abs().max() > 0.5
        assert int((found[0][1] != 0).sum()) < 0.15 * n, (
            "an owner sends a twentieth of each piece of its sum"
        )


def _alone(n: int, steps: int) -> tuple[Tensor, ...]:
    codec = TopK(0.05)
    error, total = ErrorFeedback(n, codec=codec), torch.zeros(n).double()
    for row in gradients(0, steps, n):
        out = compressed_all_reduce(row, codec=codec, error=error)
        total += out.double()
    return total, out, error.worker, error.server


def _descend(forget: bool) -> float:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(60, 40, generator=generator)
    b, codec = a @ torch.randn(40, generator=generator), TopK(0.05)
    w, error = torch.zeros(40), ErrorFeedback(40, codec=codec)
    for _ in range(3000):
        gradient = 2 * a.t() @ (a @ w - b) / 60 + torch.where(
            torch.arange(40) < 2, 30.0, 0.0
        ) * torch.randn(40, generator=generator)
        compressed_all_reduce(gradient, codec=codec, error=error)
        w -= 0.002 * gradient
        if forget:
            error.zero_()
    return float((a @ w - b)[2:].norm() / b.norm())


@pytest.mark.full  # what is left is held by test_error_feedback
def test_descent_gets_there_only_with_its_errors():
    """Two loud coordinates of pure noise are always the largest: the others move by way of the
    error, or never."""
    assert _descend(forget=False) < 0.5 * _descend(forget=True)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_refuses(ratio: float):
    with pytest.raises(ValueError, match=r"ratio is .*above 0 and at most 1"):
        TopK(ratio)


def test_has_a_name():
    assert TopK(0.25).name == "topk(ratio=0.25)"
    assert parse("topk") == TopK()
