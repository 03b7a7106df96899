"""Calls of the launchers of pyops/ops/triton, on tensors without memory, by the kernels' stem.

Shapes are those of training: 8192 tokens of 1024 to 16384 numbers, vocabularies of 32000 to 262144.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["TRITON", "WITH_PRODUCTS", "Case", "empty", "short_name"]

TOKENS = 8192
WIDTHS, VOCABULARIES = (1024, 2048, 4096, 8192, 16384), (32000, 50304, 131072, 262144)
BF16, F32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A launcher's call; bytes and operations are those of an element of its largest input, or of
    the output of a gate."""

    name: str
    call: Callable[[], object]
    bytes: float
    flops: int


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def short_name(dtype: torch.dtype) -> str:
    """Of a dtype, for the name of a case."""
    return "bf16" if dtype == BF16 else "fp32"


def norms() -> Iterator[Case]:
    from pyops.ops.triton import norm as kernels

    for dtype, width in [(BF16, w) for w in WIDTHS] + [(F32, w) for w in WIDTHS]:
        x, w, statistic = (
            empty(TOKENS, width, dtype=dtype),
            empty(width, dtype=dtype),
            empty(TOKENS, dtype=F32),
        )
        size, label = dtype.itemsize, f"{width} {short_name(dtype)}"
        rms_back = partial(
            kernels.rms_norm_backward, x, None, x, w, statistic, offset=0.0, weight_grad=True
        )
        layer_back = partial(
            kernels.layer_norm_backward, x, x, x, w, statistic, statistic, weight_grad=True
        )
        yield Case(
            f"rms {label}", partial(kernels.rms_norm, x, w, eps=1e-6, offset=0.0), 2 * size, 4
        )
        yield Case(
            f"add layer {label}",
            partial(kernels.add_layer_norm, x, x, w, w, eps=1e-6),
            4 * size,
            10,
        )
        yield Case(f"rms back {label}", rms_back, 3 * size, 9)
        yield Case(f"add layer back {label}", layer_back, 4 * size, 14)


def activations() -> Iterator[Case]:
    from pyops.ops.triton import activation as kernels

    for dtype in (BF16, F32):
        x, bias, size = empty(TOKENS, 4096, dtype=dtype), empty(4096, dtype=dtype), dtype.itemsize
        half = empty(TOKENS, 2048, dtype=dtype)
        for name, flops in (("gelu", 40), ("gelu_tanh", 14), ("silu", 6), ("relu", 2)):
            back = partial(
                kernels.bias_activation_backward, x, x, bias, activation=name, bias_grad=True
            )
            yield Case(
                f"{name} {short_name(dtype)}",
                partial(kernels.bias_activation, x, bias, activation=name),
                2 * size,
                flops,
            )
            yield Case(f"{name} back {short_name(dtype)}", back, 3 * size, flops + 10)
        gated_back = partial(
            kernels.bias_gated_backward, half, x, None, activation="silu", bias_grad=False
        )
        yield Case(
            f"swiglu {short_name(dtype)}",
            partial(kernels.bias_gated, x, None, activation="silu"),
            3 * size,
            6,
        )
        yield Case(f"swiglu back {short_name(dtype)}", gated_back, 5 * size, 12)


def cross_entropies() -> Iterator[Case]:
    from pyops.ops.triton import cross_entropy as kernels

    rows = 4096
    y, maxima, coefficients = (
        empty(rows, dtype=torch.int64),
        empty(rows, dtype=F32),
        empty(rows, 3, dtype=F32),
    )
    for dtype, columns in [(BF16, v) for v in VOCABULARIES] + [(F32, v) for v in VOCABULARIES]:
        z, label = empty(rows, columns, dtype=dtype), f"{columns} {short_name(dtype)}"
        place: dict[str, Any] = {"ignore_index": -100, "first_column": 0, "columns": columns}
        for name, numbers in (("statistics", 3), ("statistics + sum", 4)):
            out = empty(rows, numbers, dtype=F32)
            statistics = partial(kernels.cross_entropy_statistics_, out, z, y, **place)
            yield Case(f"{name} {label}", statistics, dtype.itemsize, 5 + numbers)
        gradient = partial(kernels.cross_entropy_gradient_, z, z, y, maxima, coefficients, **place)
        yield Case(f"gradient {label}", gradient, 2 * dtype.itemsize, 5)


def dropouts() -> Iterator[Case]:
    from pyops.ops.triton import dropout as kernels

    state = empty(2, dtype=torch.int64)
    for dtype in (BF16, F32):
        x, bias, size = empty(TOKENS, 4096, dtype=dtype), empty(4096, dtype=dtype), dtype.itemsize
        back = partial(kernels.bias_dropout_add_backward, x, state, p=0.1, bias_grad=True)
        part = partial(kernels.dropout, x, state, p=0.1, row=4096, row_stride=8192)
        yield Case(
            f"bias dropout add {short_name(dtype)}",
            partial(kernels.bias_dropout_add, x, bias, x, state, p=0.1),
            3 * size,
            5,
        )
        yield Case(f"back {short_name(dtype)}", back, 3 * size, 3)
        yield Case(f"part of rows {short_name(dtype)}", part, 2 * size, 3)


def rotaries() -> Iterator[Case]:
    from pyops.ops.triton import rotary as kernels

    for dtype in (BF16, F32):
        x, angle = empty(2, 4096, 32, 128, dtype=dtype), empty(4096, 64, dtype=F32)
        for name, interleaved in (("halves", False), ("pairs", True)):
            turn = partial(kernels.rotary, x, angle, angle, interleaved=interleaved, inverse=False)
            yield Case(f"{name} {short_name(dtype)}", turn, 2 * dtype.itemsize, 3)


def nm_masks() -> Iterator[Case]:
    """Bytes beside those of two tensors: an eighth of one of bits for each element."""
    from pyops.ops.triton.sparse import nm_mask as kernels

    for dtype in (BF16, F32):
        w = empty(4096, 4096, dtype=dtype)
        two_of_four = partial(kernels.nm_mask, w, n=2, m=4, dim=1)
        yield Case(f"2:4 {short_name(dtype)}", two_of_four, 2 * dtype.itemsize, 8)


def radix_counts() -> Iterator[Case]:
    """A pass over the upper bits of magnitudes and one over the lower, the counts aside; and bits
    that say what stays."""
    from pyops.ops.triton.sparse import radix_count as kernels

    counts = empty(65536, dtype=torch.int64)
    for dtype in (BF16, F32):
        w, size = empty(4096, 4096, dtype=dtype), dtype.itemsize
        for name, prefix in (("upper", None), ("lower", 0x3F80)):
            counting = partial(kernels.radix_count_, [w], counts, prefix=prefix)
            yield Case(f"{name} bits {short_name(dtype)}", counting, size, 4)
        bits = empty(4096 * 4096 // 8, dtype=torch.uint8)
        yield Case(f"kept {short_name(dtype)}", partial(kernels.keep_bits_, [w], [bits]), size, 4)


def codes() -> Iterator[Case]:
    """Rows to codes, sums of codes to numbers, and a row times a matrix of codes, whose bytes are
    those of a code."""
    from pyops.ops.triton import code_rows, scaled

    for dtype in (BF16, F32):
        x, size = empty(TOKENS, 4096, dtype=dtype), dtype.itemsize
        rows = partial(scaled.quantize_rows, x, None, None, symmetric=True)
        yield Case(f"rows to codes {short_name(dtype)}", rows, size + 1, 6)
        acc, t = empty(TOKENS, 4096, dtype=torch.int32), empty(4096, dtype=F32)
        sums = partial(
            scaled.scale_product,
            acc,
            empty(TOKENS, dtype=F32),
            t,
            None,
            None,
            None,
            activation=None,
            dtype=dtype,
        )
        yield Case(f"sums of codes {short_name(dtype)}", sums, 4 + size, 3)
    for bits in (8, 4):
        kept = empty(4096, 4096 * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
        scales = empty(4096, 1 if bits == 8 else 32, dtype=F32)
        few = partial(
            code_rows.code_rows_product, empty(1, 4096), kept, scales, None, None, bits=bits
        )
        yield Case(f"one row by int{bits} bf16", few, 1.0, 4 * 8 // bits)


def fake_quantizations() -> Iterator[Case]:
    """Rows with a scale for each, with its gradient backward."""
    from pyops.ops.triton import fake_quantize as kernels

    places: dict[str, Any] = {"lo": -127, "hi": 127, "inner": 4096}
    for dtype in (BF16, F32):
        x, scale, label = (
            empty(TOKENS, 4096, dtype=dtype),
            empty(TOKENS, dtype=F32),
            short_name(dtype),
        )
        forward = partial(kernels.fake_quantize, x, scale, None, factor=1.0, **places)
        wanted: dict[str, Any] = {"factor": 1.0, "input_grad": True, "scale_grad": True, **places}
        back = partial(kernels.fake_quantize_backward, x, x, scale, None, **wanted)
        yield Case(f"rounded {label}", forward, 2 * dtype.itemsize, 5)
        yield Case(f"rounded back {label}", back, 3 * dtype.itemsize, 9)


def attentions() -> Iterator[Case]:
    """Bytes are those of a number of q, of four tensors; operations those of its row's products."""
    from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask
    from pyops.ops.attention.operands import operands_of, options_of
    from pyops.ops.triton import attention as kernels

    rows, tokens, causal = 16, 1024, AttentionMask(causal=True)
    drops = AttentionDropout(0.1, empty(2, dtype=torch.int64))
    learned = AttentionBias(scores=empty(1, 8, tokens, tokens))
    none = AttentionBias()
    for name, dtype, width, bias, dropout in (
        ("causal", BF16, 64, none, None),
        ("causal", BF16, 128, none, None),
        ("causal", F32, 64, none, None),
        ("dropout", BF16, 64, none, drops),
        ("bias", BF16, 64, learned, None),
    ):
        q = empty(rows, tokens, 8, width, dtype=dtype)
        operands = operands_of(q, q, causal, bias, dropout)
        options = options_of(q, q, causal, dropout, scale=0.125, soft_cap=None)._asdict()
        label, lse = f"{name} {width} {short_name(dtype)}", empty(rows, 8, tokens, dtype=F32)
        wanted = {"bias_grad": True, "table_grad": True, **options}
        forward = partial(kernels.attention_forward, q, q, q, *operands, **options)
        back = partial(kernels.attention_backward, q, None, q, lse, q, q, q, *operands, **wanted)
        yield Case(f"{label} forward", forward, 4 * dtype.itemsize, 4 * tokens)
        yield Case(f"{label} back", back, 8 * dtype.itemsize, 14 * tokens)


TRITON: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norms,
    "activation": activations,
    "cross_entropy": cross_entropies,
    "dropout": dropouts,
    "rotary": rotaries,
    "nm_mask": nm_masks,
    "radix_count": radix_counts,
    "codes": codes,
    "fake_quantize": fake_quantizations,
}
# With matrix products, of whose speed bytes alone say little
WITH_PRODUCTS: dict[str, Callable[[], Iterator[Case]]] = {"attention": attentions}
