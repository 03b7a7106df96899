"""Layer norm and RMS norm, alone and after the residual addition, forward and backward, against
torch eager's way.

On CUDA also against torch.compile's and what else is installed, on tensors of 256 MiB, which no
cache holds and whose kernels outlast the host's work; plain norms, and fp32, at one width and
without torch.compile, which takes seconds for each shape. `bytes`: what has to be moved. On the CPU
the heap is told to keep what is freed: whether a tensor's pages have to be made anew depends on
what else lies on the heap, and costs more than the norm itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.accuracy import Layer, compare, forward_backward, resembles
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.rivals import compiled, of_norm
from pyops.ops.layers import norm

__all__ = ["cases", "keep_the_heap", "run"]

TOKENS = 2048
ELEMENTS = 1 << 27  # of a bf16 tensor of 256 MiB
PERCENT = 85.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


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


# ours, theirs, tensors of x's shape among the arguments, vectors, elements moved per token and
# column, target
KINDS: dict[str, tuple[Layer, Layer, int, int, int, float]] = {
    "residual + layer norm": (norm.add_layer_norm, add_layer_norm, 2, 2, 8, 1.5),
    "residual + RMS norm": (norm.add_rms_norm, add_rms_norm, 2, 1, 8, 1.5),
    "layer norm": (lambda *t: (norm.layer_norm(*t),), layer_norm, 1, 2, 5, 1.0),
    "RMS norm": (lambda *t: (norm.rms_norm(*t),), rms_norm, 1, 1, 5, 1.0),
}


def case(
    name: str, kind: str, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Gradients arrive at both outputs, as in a model, whose next block adds to the sum."""
    ours, theirs, wide, vectors, moved, target = KINDS[kind]
    shapes = [(tokens, width)] * wide + [(width,)] * vectors
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    seeds = [torch.randn(tokens, width, device=device).to(dtype) for _ in range(wide)]
    calls = {
        "pyops": forward_backward(ours, leaves, seeds),
        "torch eager": forward_backward(theirs, leaves, seeds),
    }
    others = {}
    if device.type == "cuda" and wide == 2 and dtype == torch.bfloat16:
        calls["torch.compile"] = forward_backward(compiled(theirs), leaves, seeds)
    if device.type == "cuda":
        others = {
            rival: forward_backward(layer, leaves, seeds)
            for rival, layer in of_norm(kind, width, device).items()
        }
    return Case(
        "norm",
        name,
        calls | others,
        check=compare(calls["pyops"], theirs, leaves, seeds),
        device=device,
        bytes_moved=moved * tokens * width * dtype.itemsize,
        vet={
            rival: resembles(call, calls["pyops"], results=wide) for rival, call in others.items()
        },
        targets={"torch eager": target}
        if device.type == "cpu"
        else dict.fromkeys([*calls, *others][1:], 1.0),
        least={} if device.type == "cpu" else {"percent_of_copy": PERCENT},
    )


def shapes(kind: str, device: torch.device) -> Iterator[tuple[int, int, torch.dtype]]:
    """(tokens, width, dtype) of a kind's cases."""
    if device.type == "cpu":
        yield from (
            (TOKENS, width, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for width in (512, 1024, 2048)
        )
        return
    added = kind.startswith("residual")
    for width in (1024, 2048, 4096, 8192, 16384) if added else (4096,):
        yield ELEMENTS // width, width, torch.bfloat16
    if added:
        yield ELEMENTS // 4096, 4096, torch.float32


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for kind in KINDS:
        for tokens, width, dtype in shapes(kind, device):
            name = f"{kind} {str(dtype).removeprefix('torch.')}, {tokens} x {width}"
            yield name, partial(case, name, kind, tokens, width, dtype, device)


def keep_the_heap() -> None:
    """Let the heap of this process keep what is freed."""
    heap = ctypes.CDLL(None)
    if hasattr(heap, "mallopt"):
        heap.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        heap.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    if options.device.type == "cpu":
        keep_the_heap()
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
