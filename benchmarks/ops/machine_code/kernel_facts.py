"""What the compiler made of every Triton and CUDA kernel for sm_90: registers, occupancy, widths of
accesses. Needs no GPU.

python -m benchmarks.ops.machine_code.kernel_facts [NAME...]

NAME is a stem of pyops/ops/triton or csrc/cuda; without one, all of them.

warps           of a CTA
registers       of a thread; `local` are bytes of it that lie in local memory instead: spills
shared          bytes of a CTA
CTAs            that a multiprocessor holds at a time
loads, stores   widths of global accesses in bytes, and how many of each stand in the code
ahead           KiB that a multiprocessor has asked for before it needs the first of them; 33 keep
                4.3 TB/s going at 1 us
issue           instructions per element, of the loop where there is one; B, FLOP: bytes and
                operations per element
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.ops.machine_code.ahead import Compiled, Machine, compile_launches, machine_code

__all__ = [
    "CUDA",
    "TRITON",
    "WITH_PRODUCTS",
    "Case",
    "Fact",
    "elements",
    "empty",
    "main",
    "triton_facts",
]

ROOT = Path(__file__).resolve().parents[3]
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


def norms() -> Iterator[Case]:
    from pyops.ops.triton import norm as kernels

    for dtype, width in [(BF16, w) for w in WIDTHS] + [(F32, w) for w in WIDTHS]:
        x, w, statistic = (
            empty(TOKENS, width, dtype=dtype),
            empty(width, dtype=dtype),
            empty(TOKENS, dtype=F32),
        )
        size, label = dtype.itemsize, f"{width} {_short(dtype)}"
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
                f"{name} {_short(dtype)}",
                partial(kernels.bias_activation, x, bias, activation=name),
                2 * size,
                flops,
            )
            yield Case(f"{name} back {_short(dtype)}", back, 3 * size, flops + 10)
        gated_back = partial(
            kernels.bias_gated_backward, half, x, None, activation="silu", bias_grad=False
        )
        yield Case(
            f"swiglu {_short(dtype)}",
            partial(kernels.bias_gated, x, None, activation="silu"),
            3 * size,
            6,
        )
        yield Case(f"swiglu back {_short(dtype)}", gated_back, 5 * size, 12)


def cross_entropies() -> Iterator[Case]:
    from pyops.ops.triton import cross_entropy as kernels

    rows = 4096
    y, maxima, coefficients = (
        empty(rows, dtype=torch.int64),
        empty(rows, dtype=F32),
        empty(rows, 3, dtype=F32),
    )
    for dtype, columns in [(BF16, v) for v in VOCABULARIES] + [(F32, v) for v in VOCABULARIES]:
        z, label = empty(rows, columns, dtype=dtype), f"{columns} {_short(dtype)}"
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
            f"bias dropout add {_short(dtype)}",
            partial(kernels.bias_dropout_add, x, bias, x, state, p=0.1),
            3 * size,
            5,
        )
        yield Case(f"back {_short(dtype)}", back, 3 * size, 3)
        yield Case(f"part of rows {_short(dtype)}", part, 2 * size, 3)


def rotaries() -> Iterator[Case]:
    from pyops.ops.triton import rotary as kernels

    for dtype in (BF16, F32):
        x, angle = empty(2, 4096, 32, 128, dtype=dtype), empty(4096, 64, dtype=F32)
        for name, interleaved in (("halves", False), ("pairs", True)):
            turn = partial(kernels.rotary, x, angle, angle, interleaved=interleaved, inverse=False)
            yield Case(f"{name} {_short(dtype)}", turn, 2 * dtype.itemsize, 3)


def nm_masks() -> Iterator[Case]:
    """Bytes beside those of two tensors: an eighth of one of bits for each element."""
    from pyops.ops.triton.sparse import nm_mask as kernels

    for dtype in (BF16, F32):
        w = empty(4096, 4096, dtype=dtype)
        two_of_four = partial(kernels.nm_mask, w, n=2, m=4, dim=1)
        yield Case(f"2:4 {_short(dtype)}", two_of_four, 2 * dtype.itemsize, 8)


def radix_counts() -> Iterator[Case]:
    """A pass over the upper bits of magnitudes and one over the lower, the counts aside; and bits
    that say what stays."""
    from pyops.ops.triton.sparse import radix_count as kernels

    counts = empty(65536, dtype=torch.int64)
    for dtype in (BF16, F32):
        w, size = empty(4096, 4096, dtype=dtype), dtype.itemsize
        for name, prefix in (("upper", None), ("lower", 0x3F80)):
            counting = partial(kernels.radix_count_, [w], counts, prefix=prefix)
            yield Case(f"{name} bits {_short(dtype)}", counting, size, 4)
        bits = empty(4096 * 4096 // 8, dtype=torch.uint8)
        yield Case(f"kept {_short(dtype)}", partial(kernels.keep_bits_, [w], [bits]), size, 4)


def codes() -> Iterator[Case]:
    """Rows to codes, sums of codes to numbers, and a row times a matrix of codes, whose bytes are
    those of a code."""
    from pyops.ops.triton import code_rows, scaled

    for dtype in (BF16, F32):
        x, size = empty(TOKENS, 4096, dtype=dtype), dtype.itemsize
        rows = partial(scaled.quantize_rows, x, None, None, symmetric=True)
        yield Case(f"rows to codes {_short(dtype)}", rows, size + 1, 6)
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
        yield Case(f"sums of codes {_short(dtype)}", sums, 4 + size, 3)
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
        x, scale, label = empty(TOKENS, 4096, dtype=dtype), empty(TOKENS, dtype=F32), _short(dtype)
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
        label, lse = f"{name} {width} {_short(dtype)}", empty(rows, 8, tokens, dtype=F32)
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
CUDA = tuple(sorted(path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")))
COLUMNS = {
    "warps": 5,
    "registers": 9,
    "local": 5,
    "shared": 6,
    "CTAs": 4,
    "loads": 18,
    "stores": 14,
    "ahead": 6,
}
HEAD = " ".join([f"{'kernel':<54}", *(f"{name:>{width}}" for name, width in COLUMNS.items())])


def _short(dtype: torch.dtype) -> str:
    return "bf16" if dtype == BF16 else "fp32"


def elements(launch: Compiled) -> int:
    """Elements that a program works on at a time: what its tile constants say."""
    a = launch.arguments
    return {
        "_rows_forward": lambda: a["ROWS"] * a["BLOCK"] * a["CHUNKS"],
        "_rows_backward": lambda: a["ROWS"] * a["BLOCK"] * a["CHUNKS"],
        "_combine": lambda: 4 * a["BLOCKS"],
        "_statistics": lambda: a["LANES"] * a["GROUP"],
        "_rotary": lambda: a["HEADS"] * 2 * a["PAIRS"],
        "_sum_products": lambda: a["ROWS"] * a["WIDTH"],
        "_product": lambda: a["OUTPUTS"] * a["UNITS"] * a["UNIT"],  # bytes of codes
    }.get(
        launch.kernel,
        lambda: a.get("ROWS", a.get("M", 1)) * a.get("COLUMNS", a.get("BLOCK", a.get("N", 1))),
    )()


def line(name: str, machine: Machine, warps: int, dynamic: int = 0) -> str:
    ctas = machine.ctas(32 * warps, dynamic)
    loads, stores = (
        " ".join(f"{size}x{n}" for size, n in found.items())
        for found in (machine.loads, machine.stores)
    )
    ahead = round(machine.ahead * 32 * warps * ctas / 1024)
    facts = (
        warps,
        machine.registers,
        machine.local,
        machine.shared + dynamic,
        ctas,
        loads,
        stores,
        ahead,
    )
    return " ".join(
        [
            f"{name:<54}",
            *(f"{fact:>{width}}" for fact, width in zip(facts, COLUMNS.values(), strict=True)),
        ]
    )


class Fact(NamedTuple):
    """A launch of a case. `issue`: instructions of a program, or of a turn of its loop, over its
    elements."""

    name: str
    case: Case
    machine: Machine
    warps: int
    shared: int
    grid: int
    issue: float


def triton_facts(stem: str, only: Collection[str] | None = None) -> Iterator[Fact]:
    """Of every launch of every case, or of those with these names; the sum that many cases end with
    once."""
    seen = set()
    for case in (TRITON | WITH_PRODUCTS)[stem]():
        if only is not None and case.name not in only:
            continue
        for launch in compile_launches(case.call):
            name = f"{case.name}: {launch.kernel.lstrip('_')}"
            if launch.kernel == "_column_sum":
                name = f"any {_short(launch.arguments['out'].dtype)}: column_sum"
            if name in seen:
                continue
            seen.add(name)
            (machine,) = machine_code(launch.cubin)
            issue = machine.loop * 32 * launch.warps / elements(launch)
            yield Fact(name, case, machine, launch.warps, launch.shared, launch.grid, issue)


def of_triton(stem: str) -> None:
    """A line for every launch."""
    print(f"\n{stem} (Triton)\n{HEAD} {'issue':>6} {'B':>4} {'FLOP':>4}")
    for fact in triton_facts(stem):
        text = line(fact.name, fact.machine, fact.warps, fact.shared) + f" {fact.issue:>6.1f}"
        if not fact.name.startswith("any "):
            text += f" {fact.case.bytes:>4.3g} {fact.case.flops:>4}"
        print(text)


def cubin_of(stem: str, nvcc: str, folder: Path) -> bytes:
    """Compiled as .ci/compile_cuda.sh does."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    include, out = Path(spec.origin).parent / "include", folder / f"{stem}.cubin"
    exact = re.search(
        rf"csrc/cuda/{stem}\.cu [^\n]*-fmad=false", (ROOT / "CMakeLists.txt").read_text()
    )
    options = [
        "-std=c++17",
        "-O3",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-DUSE_CUDA=1",
        "-isystem",
        str(include),
    ]
    source = ROOT / "csrc" / "cuda" / f"{stem}.cu"
    subprocess.run(
        [
            nvcc,
            *options,
            *(["-fmad=false"] if exact else []),
            "-arch=sm_90",
            "-cubin",
            "-o",
            str(out),
            str(source),
        ],
        check=True,
    )
    return out.read_bytes()


def _readable(name: str) -> str:
    """`step_kernel<Adam, false>`."""
    text = subprocess.run(
        ["c++filt", name], check=True, capture_output=True, text=True
    ).stdout.strip()
    for pattern, short in (
        (r"pyops::cuda::|pyops::|\(anonymous namespace\)::", ""),
        (r"^void ", ""),
        (r"\(int\)|\(bool\)", ""),
    ):
        text = re.sub(pattern, short, text)
    return text.split("(")[0]


def of_cuda(stem: str) -> None:
    """A line for every kernel; all are launched with 256 threads."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print(f"\n{stem} (CUDA): no nvcc on this machine: skipped")
        return
    print(f"\n{stem} (CUDA)\n{HEAD}")
    with tempfile.TemporaryDirectory() as folder:
        for machine in machine_code(cubin_of(stem, nvcc, Path(folder))):
            print(line(_readable(machine.name), machine, 8))


def main() -> int:
    known = [*TRITON, *WITH_PRODUCTS, *CUDA]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ops.machine_code.kernel_facts",
        description="What the compiler made of the kernels.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(known)}; all when none is given",
    )
    names = parser.parse_args().names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no kernels called {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        (of_cuda if name in CUDA else of_triton)(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
