"""Blocks of a decoder as token_blocks_ takes them, of every kind of product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.decoding.token_blocks import BlockForm, kind_of

__all__ = ["DIM", "FORM", "blocks_of", "form", "kept_of"]

DIM, HEADS, GROUPS, WIDTH, HIDDEN, ROOM = 32, 4, 2, 8, 48, 6
FORM: dict[str, Any] = {
    "width": WIDTH,
    "scale": 0.4,
    "eps": 1e-3,
    "rms": True,
    "activation": "silu",
    "gated": True,
    "interleaved": True,
}


def norm_of(device: torch.device, *, bias: bool) -> tuple[list[Tensor], int]:
    operands = [1 + 0.3 * torch.randn(DIM, device=device)]
    if bias:
        operands.append(torch.randn(DIM, device=device))
    return operands, kind_of(bias=bias)


# Bits of a code, its smallest value and the one behind its largest, numbers of a group (0: a scale
# for each output), whether there are zero points.
CODES: dict[str, tuple[int, int, int, int, bool]] = {
    "int8": (8, -127, 128, 0, False),
    "uint8": (8, 0, 256, 16, True),
    "int4": (4, 0, 256, 8, False),
}


def product_of(
    device: torch.device, outputs: int, inputs: int, *, by: str, bias: bool
) -> tuple[list[Tensor], int]:
    """The operands of a linear layer and their kind."""
    operands, kind = [torch.randn(outputs, inputs, device=device) / inputs**0.5], kind_of(bias=bias)
    if by != "numbers":
        bits, low, high, group, zero_points = CODES[by]
        dtype = torch.int8 if low < 0 else torch.uint8
        groups = inputs // group if group else 1
        codes = torch.randint(low, high, (outputs, inputs * bits // 8), device=device).to(dtype)
        scales = torch.rand(outputs, groups, device=device) / 2 ** (bits - 1) / inputs**0.5
        zeros = torch.randint(100, 150, (outputs, groups), device=device, dtype=torch.int32)
        operands = [codes, scales, *([zeros] if zero_points else [])]
        kind = kind_of(bits, zero_points=zero_points, bias=bias)
    if bias:
        operands.append(torch.randn(outputs, device=device))
    return operands, kind


def blocks_of(
    device: torch.device,
    *,
    count: int = 2,
    merged: bool = False,
    by: tuple[str, ...] = ("numbers",),
    bias: bool = False,
    norm_bias: bool = False,
    gated: bool = True,
) -> tuple[list[Tensor], list[int]]:
    """Operands and kinds of some blocks, whose products are of the kinds `by` in turn."""
    heads = HEADS * WIDTH
    inner = [3 * heads] if merged else [heads, 2 * GROUPS * WIDTH]
    inner_sizes = [(size, DIM) for size in inner]
    outer = [(HIDDEN * (1 + gated), DIM), (DIM, HIDDEN)]
    operands: list[Tensor] = []
    kinds: list[int] = []
    turn = 0
    for _ in range(count):
        for sizes in ([*inner_sizes, (DIM, heads)], outer):
            parts = [norm_of(device, bias=norm_bias)]
            for outputs, inputs in sizes:
                parts.append(product_of(device, outputs, inputs, by=by[turn % len(by)], bias=bias))
                turn += 1
            for tensors, kind in parts:
                operands += tensors
                kinds.append(kind)
    return operands, kinds


def kept_of(
    device: torch.device, *, count: int = 2, rows: int = 3, merged: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each block."""
    shape = (rows, HEADS if merged else GROUPS, ROOM, WIDTH)
    keys, values = torch.randn(2, count, *shape, device=device).unbind()
    return list(keys.unbind()), list(values.unbind())


def form(**changed: Any) -> BlockForm:
    return BlockForm(**{**FORM, **changed})
