"""Every Triton kernel compiles for sm_90, with the arguments that its launcher gives it: once each
in the suite, with every dtype and set of operands under `-m full`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.ops.machine_code.ahead import compile_launches

pytestmark = pytest.mark.cpu_only

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def activations() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton import activation as kernels

    def operands(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in ((64, 1024), (1024,), (64, 512))]

    for name, dtype in (("gelu", BF16), ("gelu_tanh", F32), ("relu", F16), ("silu", F64)):
        x, bias, _ = operands(dtype)
        yield name, lambda x=x, b=bias, n=name: kernels.bias_activation(x, b, activation=n)
    x, bias, dy = operands(BF16)
    back = {"activation": "gelu", "bias_grad": True}
    yield "gated", lambda: kernels.bias_gated(x, bias, activation="silu")
    yield "backward", lambda: kernels.bias_activation_backward(x, x, bias, **back)
    yield (
        "backward without bias",
        lambda: kernels.bias_activation_backward(x, x, None, **back | {"bias_grad": False}),
    )
    yield "gated backward", lambda: kernels.bias_gated_backward(dy, x, bias, **back)


def norms() -> Iterator[tuple[str, Callable[[], object]]]:
    """Narrow rows, several to a program; one row in registers; chunks."""
    from pyops.ops.triton import norm as kernels

    def operands(columns: int, dtype: torch.dtype, of_weight: torch.dtype) -> list[torch.Tensor]:
        statistics = torch.zeros(64, dtype=F64 if dtype == F64 else F32)
        return [
            torch.zeros(64, columns, dtype=dtype),
            torch.zeros(columns, dtype=of_weight),
            statistics,
        ]

    x, w, statistic = operands(1024, BF16, F32)
    back = {"offset": 1.0, "weight_grad": True}
    yield "layer", lambda: kernels.add_layer_norm(x, x, w, w, eps=1e-5)
    yield "rms", lambda: kernels.rms_norm(x, w, eps=1e-6, offset=1.0)
    yield (
        "layer backward",
        lambda: kernels.layer_norm_backward(x, x, x, w, statistic, statistic, weight_grad=True),
    )
    yield "rms backward", lambda: kernels.rms_norm_backward(x, None, x, w, statistic, **back)
    f64 = operands(64, F64, F64)
    yield "float64", lambda: kernels.rms_norm_backward(f64[0], None, f64[0], *f64[1:], **back)
    wide = operands(12000, F16, F16)
    yield (
        "chunks",
        lambda: kernels.add_rms_norm(
            wide[0], x.new_zeros(64, 12000), wide[1], eps=1e-6, offset=0.0
        ),
    )
    yield (
        "chunks backward",
        lambda: kernels.rms_norm_backward(wide[0], None, wide[0], *wide[1:], **back),
    )


def cross_entropies() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton import cross_entropy as kernels

    y, place = (
        torch.zeros(4, dtype=torch.int64),
        {"ignore_index": -100, "first_column": 16, "columns": 5000},
    )
    for dtype, numbers in ((F32, 3), (BF16, 4), (F64, 4)):
        wide = F64 if dtype == F64 else F32
        z, out = torch.zeros(4, 5008, dtype=dtype), torch.zeros(4, numbers, dtype=wide)
        yield (
            f"statistics, {dtype}",
            lambda z=z, out=out: kernels.cross_entropy_statistics_(out, z, y, **place),
        )
        m, c = torch.zeros(4, dtype=wide), torch.zeros(4, 3, dtype=wide)
        yield (
            f"gradient, {dtype}",
            lambda z=z, m=m, c=c: kernels.cross_entropy_gradient_(z, z, y, m, c, **place),
        )
    z, out = torch.zeros(4, 300, dtype=BF16), torch.zeros(4, 4)
    few = {**place, "first_column": 0, "columns": 300}
    yield (
        "statistics of less than a tile",
        lambda: kernels.cross_entropy_statistics_(out, z, y, **few),
    )


def dropouts() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton import dropout as kernels

    state = torch.tensor([-7, 5])
    for dtype in (BF16, F64):
        x, bias = torch.zeros(64, 1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
        yield f"{dtype}", lambda x=x, b=bias: kernels.bias_dropout_add(x, b, x, state, p=0.1)
    x = torch.zeros(64, 1024, dtype=F16)
    yield "nothing dropped", lambda: kernels.bias_dropout_add(x, None, x, None, p=0.0)
    yield "backward", lambda: kernels.bias_dropout_add_backward(x, state, p=0.1, bias_grad=True)
    yield (
        "part of each row",
        lambda: kernels.dropout(x.float(), state, p=0.1, row=2048, row_stride=4096),
    )


def rotaries() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton import rotary as kernels

    for dtype, width, interleaved in ((BF16, 64, False), (F32, 48, True), (F64, 64, False)):
        x, angle = torch.zeros(2, 16, 12, 64, dtype=dtype), torch.zeros(16, width // 2)
        yield (
            f"{dtype}",
            lambda x=x, a=angle, i=interleaved: kernels.rotary(x, a, a, interleaved=i, inverse=i),
        )


def nm_masks() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton.sparse import nm_mask as kernels

    for dtype in (BF16, F32, F64):
        w = torch.zeros(64, 128, dtype=dtype)
        yield f"{dtype}", lambda w=w: kernels.nm_mask(w, n=2, m=4, dim=1)
    kernel = torch.zeros(8, 16, 3, 3, dtype=F16)
    yield "along channels", lambda: kernels.nm_mask(kernel, n=3, m=8, dim=1)


def fake_quantizations() -> Iterator[tuple[str, Callable[[], object]]]:
    """Scales of rows, of groups, of columns, and of a whole tensor."""
    from pyops.ops.triton import fake_quantize as kernels

    options = {"lo": -7, "hi": 7, "factor": 0.1}
    back = options | {"input_grad": True, "scale_grad": True}
    for dtype, channels, inner in ((F32, 64, 1024), (BF16, 512, 128), (F16, 1024, 1), (F64, 64, 8)):
        x = torch.zeros(64, channels * inner // 64, dtype=dtype)
        s = torch.ones(channels, dtype=F64 if dtype == F64 else F32)
        z = None if dtype == F32 else s
        yield (
            f"{dtype}",
            lambda x=x, s=s, z=z, i=inner: kernels.fake_quantize(x, s, z, inner=i, **options),
        )
        yield (
            f"{dtype} backward",
            lambda x=x, s=s, z=z, i=inner: kernels.fake_quantize_backward(
                x, x, s, z, inner=i, **back
            ),
        )


def attentions() -> Iterator[tuple[str, Callable[[], object]]]:
    """Nothing that hides; a layout; all that hides but a layout, all that is added, and dropout;
    float64. The first compiles in a third of the time of the others."""
    yield from attention_of(F16, hides=False, soft_cap=0.0)
    yield from attention_of(F32, hides=False, lists=True, soft_cap=0.0)
    yield from attention_of(BF16, hides=True, num_keys=12)
    yield from attention_of(F64, hides=True)
    yield from attention_of(F64, hides=True, num_keys=12)


def attention_of(
    dtype: torch.dtype, *, hides: bool, lists: bool = False, **changes: float
) -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.attention.operands import Operands
    from pyops.ops.triton import attention as kernels
    from tests.ops.attention.sample import attention_forward

    (q, k, v, *operands), numbers = attention_forward(torch.device("cpu"))
    given = Operands(*operands)._asdict()
    masks = ("mask", "query_documents", "key_documents", "query_places", "key_places")
    tables = ("row_counts", "row_indices", "column_counts", "column_indices")
    absent = () if hides else ("bias", "table", "buckets", "slopes", "state", *masks)
    absent += () if lists else tables
    wide = F64 if dtype == F64 else F32
    for name, x in given.items():
        if name in absent or (name == "key_places" and "num_keys" in changes):
            given[name] = None
        elif name in ("table", "slopes") or (name == "bias" and dtype == F64):
            given[name] = x.to(wide)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    y, lse = torch.zeros_like(q), torch.zeros(2, 4, 6, dtype=wide)
    options = {**numbers, **changes}
    wanted = {"bias_grad": True, "table_grad": True}
    yield f"{dtype}", lambda: kernels.attention_forward(q, k, v, *given.values(), **options)
    yield (
        f"{dtype}, backward",
        lambda: kernels.attention_backward(
            y, lse, y, lse, q, k, v, *given.values(), **wanted, **options
        ),
    )


def radix_counts() -> Iterator[tuple[str, Callable[[], object]]]:
    from pyops.ops.triton.sparse import radix_count as kernels

    counts, bits = torch.zeros(65536, dtype=torch.int64), torch.zeros(512, dtype=torch.uint8)
    for dtype, prefix in ((F32, None), (F32, 7), (BF16, None), (F16, 0)):
        x = torch.zeros(4096, dtype=dtype)
        yield (
            f"counts {dtype}, {prefix}",
            lambda x=x, p=prefix: kernels.radix_count_([x], counts, prefix=p),
        )
    for dtype in (F32, BF16, F16, F64):
        x = torch.zeros(4096, dtype=dtype)
        yield f"bits {dtype}", lambda x=x: kernels.keep_bits_([x], [bits])


def codes() -> Iterator[tuple[str, Callable[[], object]]]:
    """Rows in registers and wider ones, given scales, every kind of sum, codes of 8 and 4 bits."""
    from pyops.ops.triton import code_rows, scaled

    none = {"activation": None, "dtype": BF16}
    for dtype, columns, symmetric in ((BF16, 1024, True), (F32, 20000, True), (F16, 512, False)):
        x = torch.zeros(32, columns, dtype=dtype)
        yield (
            f"rows {dtype}",
            lambda x=x, s=symmetric: scaled.quantize_rows(x, None, None, symmetric=s),
        )
        yield f"extents {dtype}", lambda x=x, s=symmetric: scaled.row_extents(x, symmetric=s)
    x, one = torch.zeros(32, 512), torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int32)
    yield "given", lambda: scaled.quantize_rows(x, one, zero, symmetric=False)
    acc, s, t = torch.zeros(32, 512, dtype=torch.int32), torch.ones(32), torch.ones(512)
    yield "sums", lambda: scaled.scale_product(acc, s, t, None, None, None, **none)
    yield "sums in place", lambda: scaled.scale_sums_(acc, s, t, None, None, None)
    yield (
        "all sums",
        lambda: scaled.scale_product(acc, s, t, acc[:, 0], acc[0], t, activation="gelu", dtype=F32),
    )
    for bits, group, asymmetric in ((8, 512, False), (4, 128, False), (4, 64, True)):
        kept = torch.zeros(64, 512 * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
        scales = torch.ones(64, 512 // group)
        zeros = torch.zeros_like(scales, dtype=torch.int32) if asymmetric else None
        yield (
            f"few rows, {bits} bits",
            lambda k=kept, s=scales, z=zeros, b=bits: code_rows.code_rows_product(
                x[:2].bfloat16(), k, s, z, None, bits=b
            ),
        )


STEMS = {
    "attention": attentions,
    "codes": codes,
    "activation": activations,
    "dropout": dropouts,
    "rotary": rotaries,
    "nm_mask": nm_masks,
    "radix_count": radix_counts,
    "fake_quantize": fake_quantizations,
    "norm": norms,
    "cross_entropy": cross_entropies,
}


def compile_all(stem: str, *, once: bool) -> set[str]:
    """The kernels that compiled; each at its first launch alone if `once`."""
    seen: set[str] = set()
    for name, call in STEMS[stem]():
        compiled = compile_launches(call, leave_out=seen if once else ())
        assert compiled or once, f"{name} launched nothing"
        assert all(
            ".target sm_90" in launch.ptx and re.search(r"\b(st|atom|red)\.global", launch.ptx)
            for launch in compiled
        ), name
        seen |= {launch.kernel for launch in compiled}
    return seen


@pytest.mark.parametrize("stem", STEMS)
def test_each_kernel_compiles_for_sm_90(stem: str):
    """The cut of what follows: every kernel, in one of its dtypes and with one set of operands."""
    assert compile_all(stem, once=True)


# Under the older Triton, too, in `make test-full`.
@pytest.mark.full
@pytest.mark.parametrize("stem", STEMS)
def test_kernels_compile_for_sm_90(stem: str):
    assert compile_all(stem, once=False)
