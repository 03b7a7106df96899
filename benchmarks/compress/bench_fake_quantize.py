"""Fake quantization, forward and backward, beside the same chain of torch's operations and torch's
own kernels.

16 Mi numbers in fp32: a scale for each row of a weight, one for all, one for a group of 64, and
learned steps. `bytes`: what has to be moved, x and y forward, and dy, x and dx backward. On the CPU
the heap is told to keep what is freed, as in bench_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.instruments.accuracy import forward_backward
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.ops.layers.bench_norm import keep_the_heap
from pyops.ops.layers.fake_quantize import fake_quantize

__all__ = ["cases", "run"]

ROWS, COLUMNS = 4096, 4096


def chain(x: Tensor, scale: Tensor, group: int | None, hi: int) -> Tensor:
    """What is written without a kernel: round with a gradient that goes straight through, and the
    clip's mask."""
    s = scale.detach()
    if group:
        x, shape = x.view(*scale.shape, group), x.shape
    s = s[..., None] if scale.numel() > 1 else s
    v = (x / s).clamp(-hi - 0.5, hi + 0.5)
    rounded = v + (v.round().clamp(-hi, hi) - v).detach()
    y = rounded * s
    return y.view(shape) if group else y


def case(name: str, scales: tuple[int, ...], hi: int, learned: bool, device: torch.device) -> Case:
    x = torch.randn(ROWS, COLUMNS, device=device).requires_grad_()
    group = COLUMNS // scales[1] if len(scales) == 2 else None
    size = x.detach().view(*(scales or (1,)), -1).abs().amax(-1) / hi
    scale = (size if scales else size[0]).clone()
    seeds = [torch.randn_like(x)]
    leaves = [x, scale.requires_grad_()] if learned else [x]

    def ours(x: Tensor, s: Tensor = scale) -> Tensor:
        return fake_quantize(x, s, lo=-hi, hi=hi, group=group)

    def eager(x: Tensor, s: Tensor = scale) -> Tensor:
        return chain(x, s, group, hi)

    def torchs(x: Tensor, s: Tensor = scale) -> Tensor:
        if learned:
            zero, factor = torch.zeros_like(s), (COLUMNS * hi) ** -0.5
            found: Tensor = torch._fake_quantize_learnable_per_channel_affine(
                x, s, zero, 0, -hi, hi, factor
            )
            return found
        if not scales:
            return torch.fake_quantize_per_tensor_affine(x, float(s), 0, -hi, hi)
        zero = torch.zeros(len(s), dtype=torch.int32, device=s.device)
        return torch.fake_quantize_per_channel_affine(x, s, zero, 0, -hi, hi)

    calls = {"pyops": forward_backward(ours, leaves, seeds)}
    if not learned:
        calls["torch's chain"] = forward_backward(eager, leaves, seeds)
    if group is None:
        calls["torch's kernel"] = forward_backward(torchs, leaves, seeds)

    def check() -> float:
        """Gradients and values of the chain, or of torch's kernel; codes at ties may differ."""
        own, other = (call() for call in list(calls.values())[:2])
        worst = 0.0
        for a, b in zip(own, other, strict=True):
            different = (a - b).abs() > 1e-4 * b.abs() + 1e-6
            worst = max(worst, float(different.double().mean()))
        if worst > 1e-5:
            raise AssertionError(f"{worst:.1e} of the numbers differ")
        return worst

    return Case(
        "fake_quantize",
        name,
        calls,
        check=check,
        device=device,
        bytes_moved=5 * x.numel() * 4,
        targets={} if learned else {"torch's chain": 3.0},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    size = f"{ROWS} x {COLUMNS} float32"
    for kind, scales, hi, learned in (
        ("a scale for each row", (ROWS,), 127, False),
        ("one scale", (), 127, False),
        ("a scale for 64 numbers", (ROWS, COLUMNS // 64), 7, False),
        ("a learned scale for each row", (ROWS,), 7, True),
    ):
        name = f"fake quantization {size}, {kind}"
        yield name, partial(case, name, scales, hi, learned, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    if options.device.type == "cpu":
        keep_the_heap()
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
