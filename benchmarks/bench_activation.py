"""What stands between two linear layers, forward and backward: bias + activation, gated, bias + dropout + residual, rotary.

Each against torch eager's way to the same result; on CUDA also against torch.compile's. `bytes`: what has to be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.harness import Case, Row, run_cases
from pyops.ops import activation, dropout
from pyops.ops.rotary import rotary

__all__ = ["cases", "run"]

TOKENS = 2048
TARGET = {"torch eager": 1.5}
Layer = Callable[..., Tensor]


def forward_backward(layer: Layer, leaves: list[Tensor], dy: Tensor) -> Callable[[], list[Tensor]]:
    """A call that gives y and the leaves' gradients, each newly made."""

    def call() -> list[Tensor]:
        y = layer(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    return call


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def compare(ours: Callable[[], list[Tensor]], layer: Layer, leaves: list[Tensor], dy: Tensor) -> Callable[[], float]:
    """A check that no result is further from float64 than twice torch's, in the largest element; returns our largest error."""

    def check() -> float:
        twins = [t.detach().double().requires_grad_() for t in leaves]
        exact = forward_backward(layer, twins, dy.double())()
        worst = 0.0
        for a, b, e in zip(ours(), forward_backward(layer, leaves, dy)(), exact, strict=True):
            error, allowed = largest(a.double() - e), 2 * largest(b.double() - e)
            if error > allowed + torch.finfo(a.dtype).eps * largest(e) or not largest(e) > 0:
                raise AssertionError(f"error {error}, torch's times two {allowed}")
            worst = max(worst, error)
        return worst

    return check


def case(
    name: str, ours: Layer, theirs: Layer, leaves: list[Tensor], *, shape: tuple[int, ...], moved: int, checked: bool = True,
    target: bool = True,
) -> Case:  # fmt: skip
    """`moved`: elements read and written by both passes. `checked`: False where the two draw other random numbers."""
    x = leaves[0]
    dy = torch.randn(shape, device=x.device).to(x.dtype)
    calls = {"pyops": forward_backward(ours, leaves, dy), "torch eager": forward_backward(theirs, leaves, dy)}
    if x.is_cuda:
        calls["torch.compile"] = forward_backward(torch.compile(theirs, dynamic=False), leaves, dy)
    return Case(
        "activation", name, calls, check=compare(calls["pyops"], theirs, leaves, dy) if checked else lambda: None,
        device=x.device, bytes_moved=moved * x.element_size(), targets=TARGET if target else {},
    )  # fmt: skip


def leaf(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def biased(name: str, act: str, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    def theirs(x: Tensor, b: Tensor) -> Tensor:
        return functional.gelu(x + b, approximate="tanh" if act == "gelu_tanh" else "none")

    leaves = [leaf(TOKENS, width, dtype=dtype, device=device), leaf(width, dtype=dtype, device=device)]
    ours = partial(activation.bias_activation, activation=act)
    return case(name, ours, theirs, leaves, shape=(TOKENS, width), moved=5 * TOKENS * width)


def gated(name: str, bias: bool, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    def theirs(x: Tensor, b: Tensor | None = None) -> Tensor:
        gate, up = (x if b is None else x + b).chunk(2, dim=-1)
        return functional.silu(gate) * up

    leaves = [leaf(TOKENS, 2 * width, dtype=dtype, device=device)]
    leaves += [leaf(2 * width, dtype=dtype, device=device)] if bias else []
    return case(name, activation.bias_gated, theirs, leaves, shape=(TOKENS, width), moved=8 * TOKENS * width)


def dropped(name: str, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    def theirs(x: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return r + functional.dropout(x + b, p=0.1)

    x, r = (leaf(TOKENS, width, dtype=dtype, device=device) for _ in range(2))
    state = torch.tensor([1234, 0], device=device)
    ours = partial(dropout.bias_dropout_add, p=0.1, state=state)
    leaves = [x, leaf(width, dtype=dtype, device=device), r]
    return case(name, ours, theirs, leaves, shape=(TOKENS, width), moved=5 * TOKENS * width, checked=False)


def turned(name: str, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Hugging Face's way: x * cos + rotate_half(x) * sin, with tables repeated over both halves, in x's dtype."""
    angle = torch.arange(TOKENS, device=device)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2, device=device) / 64)
    cos, sin = angle.cos(), angle.sin()
    whole_cos, whole_sin = (torch.cat([t, t], dim=-1).to(dtype)[:, None] for t in (cos, sin))

    def theirs(x: Tensor) -> Tensor:
        c, s = (whole_cos, whole_sin) if x.dtype == dtype else (whole_cos.to(x.dtype), whole_sin.to(x.dtype))
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat([-b, a], dim=-1) * s

    x = leaf(1, TOKENS, width // 64, 64, dtype=dtype, device=device)
    return case(name, lambda t: rotary(t, cos, sin), theirs, [x], shape=tuple(x.shape), moved=4 * x.numel())


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Hidden sizes of the published models; the width inside is 4 h, and 8/3 h where it is gated."""
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16,)
    for dtype in dtypes:
        short = str(dtype).removeprefix("torch.")
        for h in (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192):
            inner = 8 * h // 3 // 64 * 64
            for name, make in (
                ("bias + GELU", lambda n, h, *a: biased(n, "gelu", 4 * h, *a)),
                ("bias + GELU tanh", lambda n, h, *a: biased(n, "gelu_tanh", 4 * h, *a)),
                ("bias + SwiGLU", lambda n, h, *a, inner=inner: gated(n, True, inner, *a)),
                ("SwiGLU", lambda n, h, *a, inner=inner: gated(n, False, inner, *a)),
                ("bias + dropout + residual", dropped),
                ("rotary", turned),
            ):
                title = f"{name} {short}, {TOKENS} tokens, h = {h}"
                yield title, partial(make, title, h, dtype, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases([make for name, make in cases(options.device) if (options.only or "") in name], rounds=options.rounds)
