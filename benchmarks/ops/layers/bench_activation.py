"""What stands between two linear layers, forward and backward: bias + activation, gated, bias +
dropout + residual, rotary.

Each against torch eager's way to the same result; on CUDA also against torch.compile's and what
else is installed, on as many tokens as make the widest tensor 256 MiB, which no cache holds and
whose kernels outlast the host's work: GELU, SwiGLU and rotary at every width; the others at one,
and without torch.compile, which takes seconds for each shape. `bytes`: what has to be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.accuracy import Layer, compare, forward_backward, resembles
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.rivals import compiled, of_rotary, of_swiglu
from pyops.ops.layers import activation, dropout
from pyops.ops.layers.rotary import rotary

__all__ = ["cases", "run"]

TOKENS = 2048
ELEMENTS = 1 << 27  # of a bf16 tensor of 256 MiB
TARGET = {"torch eager": 1.5}
PERCENT = 85.0
TABLE = ("bias + GELU", "SwiGLU", "rotary")  # at every width of a GPU
Rivals = dict[str, tuple[Layer, list[Tensor]]]  # each with leaves of its own


def case(
    name: str,
    layers: tuple[Layer, Layer],
    leaves: list[Tensor],
    *,
    shape: tuple[int, ...],
    moved: int,
    checked: bool = True,
    others: Rivals | None = None,
    table: bool = False,
) -> Case:
    """`layers`: of pyops and of torch. `moved`: elements read and written by both passes.
    `checked`: False where the two draw other random numbers. `table`: on a GPU torch.compile is a
    rival too."""
    (ours, theirs), x = layers, leaves[0]
    seeds = [torch.randn(shape, device=x.device).to(x.dtype)]
    calls = {
        "pyops": forward_backward(ours, leaves, seeds),
        "torch eager": forward_backward(theirs, leaves, seeds),
    }
    more = {
        rival: forward_backward(layer, own, seeds) for rival, (layer, own) in (others or {}).items()
    }
    if x.is_cuda and table:
        calls["torch.compile"] = forward_backward(compiled(theirs), leaves, seeds)
    return Case(
        "activation",
        name,
        calls | more,
        check=compare(calls["pyops"], theirs, leaves, seeds) if checked else lambda: None,
        device=x.device,
        bytes_moved=moved * x.element_size(),
        vet={rival: resembles(call, calls["pyops"]) for rival, call in more.items()},
        targets=dict.fromkeys([*calls, *more][1:], 1.0) if x.is_cuda else TARGET,
        least={"percent_of_copy": PERCENT} if x.is_cuda else {},
    )


def leaf(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def biased(
    name: str, act: str, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> Case:
    def theirs(x: Tensor, b: Tensor) -> Tensor:
        return functional.gelu(x + b, approximate="tanh" if act == "gelu_tanh" else "none")

    leaves = [
        leaf(tokens, width, dtype=dtype, device=device),
        leaf(width, dtype=dtype, device=device),
    ]
    ours = partial(activation.bias_activation, activation=act)
    return case(
        name,
        (ours, theirs),
        leaves,
        shape=(tokens, width),
        moved=5 * tokens * width,
        table=act == "gelu",
    )


def gated(
    name: str, bias: bool, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> Case:
    def theirs(x: Tensor, b: Tensor | None = None) -> Tensor:
        gate, up = (x if b is None else x + b).chunk(2, dim=-1)
        return functional.silu(gate) * up

    leaves = [leaf(tokens, 2 * width, dtype=dtype, device=device)]
    others: Rivals = {}
    if not bias and (found := of_swiglu(device)):
        # Gate and up from two projections: the halves as tensors of their own.
        others = {
            rival: (
                layer,
                [
                    half.contiguous().detach().requires_grad_()
                    for half in leaves[0].detach().chunk(2, dim=-1)
                ],
            )
            for rival, layer in found.items()
        }
    leaves += [leaf(2 * width, dtype=dtype, device=device)] if bias else []
    return case(
        name,
        (activation.bias_gated, theirs),
        leaves,
        shape=(tokens, width),
        moved=8 * tokens * width,
        others=others,
        table=not bias,
    )


def dropped(name: str, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    def theirs(x: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return r + functional.dropout(x + b, p=0.1)

    x, r = (leaf(tokens, width, dtype=dtype, device=device) for _ in range(2))
    state = torch.tensor([1234, 0], device=device)
    ours = partial(dropout.bias_dropout_add, p=0.1, state=state)
    leaves = [x, leaf(width, dtype=dtype, device=device), r]
    return case(
        name, (ours, theirs), leaves, shape=(tokens, width), moved=5 * tokens * width, checked=False
    )


def turned(name: str, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Hugging Face's way: x * cos + rotate_half(x) * sin, with tables repeated over both halves, in
    x's dtype."""
    angle = torch.arange(tokens, device=device)[:, None] * 10000.0 ** (
        -torch.arange(0, 64, 2, device=device) / 64
    )
    cos, sin = angle.cos(), angle.sin()
    whole_cos, whole_sin = (torch.cat([t, t], dim=-1).to(dtype)[:, None] for t in (cos, sin))

    def theirs(x: Tensor) -> Tensor:
        c, s = (
            (whole_cos, whole_sin)
            if x.dtype == dtype
            else (whole_cos.to(x.dtype), whole_sin.to(x.dtype))
        )
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat([-b, a], dim=-1) * s

    x = leaf(1, tokens, width // 64, 64, dtype=dtype, device=device)
    others: Rivals = {rival: (layer, [x]) for rival, layer in of_rotary(angle, dtype=dtype).items()}
    return case(
        name,
        (lambda t: rotary(t, cos, sin), theirs),
        [x],
        shape=tuple(x.shape),
        moved=4 * x.numel(),
        others=others,
        table=True,
    )


# How to make each for h, and how many elements wide its widest tensor is.
KINDS: dict[str, tuple[Callable[..., Case], Callable[[int], int]]] = {
    "bias + GELU": (lambda n, t, h, *a: biased(n, "gelu", t, 4 * h, *a), lambda h: 4 * h),
    "bias + GELU tanh": (lambda n, t, h, *a: biased(n, "gelu_tanh", t, 4 * h, *a), lambda h: 4 * h),
    "bias + SwiGLU": (lambda n, t, h, *a: gated(n, True, t, inner(h), *a), lambda h: 2 * inner(h)),
    "SwiGLU": (lambda n, t, h, *a: gated(n, False, t, inner(h), *a), lambda h: 2 * inner(h)),
    "bias + dropout + residual": (dropped, lambda h: h),
    "rotary": (turned, lambda h: h),
}


def inner(h: int) -> int:
    """The width inside a gated MLP."""
    return 8 * h // 3 // 64 * 64


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Hidden sizes of the published models; the width inside is 4 h, and 8/3 h where it is
    gated."""
    cuda = device.type == "cuda"
    for dtype in (torch.bfloat16,) if cuda else (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        for h in (1024, 2048, 4096, 8192, 16384) if cuda else (512, 1024, 2048):
            for kind, (make, widest) in KINDS.items():
                if cuda and h != 4096 and kind not in TABLE:
                    continue
                tokens = ELEMENTS // widest(h) if cuda else TOKENS
                title = f"{kind} {short}, {tokens} tokens, h = {h}"
                yield title, partial(make, title, tokens, h, dtype, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
