"""Layer norm and RMS norm, alone and after the residual addition, forward and backward, against torch eager's way.

On CUDA also against torch.compile's. `bytes`: what has to be moved. On the CPU the heap is told to keep what is freed: whether
a tensor's pages have to be made anew depends on what else lies on the heap, and costs more than the norm itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.harness import Case, Row, run_cases
from pyops.ops import norm

__all__ = ["cases", "run"]

TOKENS = 2048
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
Layer = Callable[..., tuple[Tensor, ...]]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    s = x + residual
    return functional.layer_norm(s, s.shape[-1:], weight, bias), s


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    s = x + residual
    return functional.rms_norm(s, s.shape[-1:], weight, 1e-6), s


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (functional.layer_norm(x, x.shape[-1:], weight, bias),)


def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (functional.rms_norm(x, x.shape[-1:], weight, 1e-6),)


# ours, theirs, tensors of x's shape among the arguments, vectors, elements moved per token and column, target
KINDS: dict[str, tuple[Layer, Layer, int, int, int, float]] = {
    "residual + layer norm": (norm.add_layer_norm, add_layer_norm, 2, 2, 8, 1.5),
    "residual + RMS norm": (norm.add_rms_norm, add_rms_norm, 2, 1, 8, 1.5),
    "layer norm": (lambda *t: (norm.layer_norm(*t),), layer_norm, 1, 2, 5, 1.0),
    "RMS norm": (lambda *t: (norm.rms_norm(*t),), rms_norm, 1, 1, 5, 1.0),
}


def forward_backward(layer: Layer, leaves: list[Tensor], seeds: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A call that gives the outputs and the leaves' gradients, each newly made."""

    def call() -> list[Tensor]:
        outputs = layer(*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]

    return call


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def case(name: str, kind: str, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Gradients arrive at both outputs, as in a model, whose next block adds to the sum."""
    ours, theirs, wide, vectors, moved, target = KINDS[kind]
    shapes = [(TOKENS, width)] * wide + [(width,)] * vectors
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    seeds = [torch.randn(TOKENS, width, device=device).to(dtype) for _ in range(wide)]
    calls = {"pyops": forward_backward(ours, leaves, seeds), "torch eager": forward_backward(theirs, leaves, seeds)}
    if device.type == "cuda":
        calls["torch.compile"] = forward_backward(torch.compile(theirs, dynamic=False), leaves, seeds)

    def check() -> float:
        """No result is further from float64 than twice torch's, in the largest element."""
        twins = [t.detach().double().requires_grad_() for t in leaves]
        exact = forward_backward(theirs, twins, [s.double() for s in seeds])()
        worst = 0.0
        for a, b, e in zip(calls["pyops"](), calls["torch eager"](), exact, strict=True):
            error, allowed = largest(a.double() - e), 2 * largest(b.double() - e)
            if error > allowed + torch.finfo(a.dtype).eps * largest(e) or not largest(e) > 0:
                raise AssertionError(f"error {error}, torch's times two {allowed}")
            worst = max(worst, error)
        return worst

    return Case("norm", name, calls, check=check, device=device, bytes_moved=moved * TOKENS * width * dtype.itemsize,
                targets={"torch eager": target})  # fmt: skip


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    widths = (512, 1024, 2048) if device.type == "cpu" else (1024, 4096, 8192)
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            for width in widths:
                name = f"{kind} {str(dtype).removeprefix('torch.')}, {TOKENS} x {width}"
                yield name, partial(case, name, kind, width, dtype, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    heap = ctypes.CDLL(None)
    if options.device.type == "cpu" and hasattr(heap, "mallopt"):
        heap.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        heap.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    return run_cases([make for name, make in cases(options.device) if (options.only or "") in name], rounds=options.rounds)
