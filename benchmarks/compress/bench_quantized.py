"""Linear layers of codes beside those of floats, and beside what else torch has for int8.

    dynamic    weights and inputs of 8 bits: torch's fp32, the same chain in separate operations,
               torch.ao's quantize_dynamic (fbgemm), torchao where it is installed
    one row    weights of 8 and 4 bits and fp8 alone: fp32, _weight_int8pack_mm (bf16),
               quantize_dynamic
    passes     rows to codes, and sums to numbers, beside the same in separate operations
    a ViT      forward with all linear layers of 8 bits
    generate   8 layers, width 512, one row: tokens a second beside fp32

Results are compared with the decoded codes first; rivals, which round in other ways, must resemble
ours.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.accuracy import largest, resembles
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.rivals import installed
from pyops.models import GPT, GPTConfig, ViT, ViTConfig, generate
from pyops.ops.codes.scaled import (
    int8_product,
    quantize_rows,
    quantize_rows_reference,
    scale_product,
    scale_product_reference,
)
from pyops.quantized import FP8, Int4, Int8, Scheme, convert, decode, encode

__all__ = ["cases", "run"]

DYNAMIC = Scheme(Int8(), Int8(per="token"))
ROWS, INPUTS, OUTPUTS = 512, 1024, 4096
WIDE = 4096


def layer(inputs: int, outputs: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs, device=device)).eval()


def converted(model: nn.Module, scheme: Scheme) -> Any:
    found = copy.deepcopy(model)
    convert(found, scheme)
    return found


def call(module: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], list[Tensor]]:
    """The module's result, without gradients."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [module(x)]

    return run


def of_torch_ao(model: nn.Module) -> Any:
    """fbgemm's, deprecated in torch and still there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic

        return quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


def of_torchao(model: nn.Module) -> Any:
    """torchao's, eager."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    found = copy.deepcopy(model)
    quantize_(found, Int8DynamicActivationInt8WeightConfig())
    return found


def rivals(model: nn.Module, x: Tensor) -> dict[str, Callable[[], list[Tensor]]]:
    makers: dict[str, Callable[[], Any]] = {"torchao": lambda: call(of_torchao(model), x)}
    if x.device.type == "cpu":
        makers["torch.ao quantize_dynamic"] = lambda: call(of_torch_ao(model), x)
    return installed(makers)


def in_separate_operations(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    codes = encode(linear.weight, Int8())
    weight, scales, bias = codes.codes.t(), codes.scales, linear.bias

    def run(x: Tensor) -> Tensor:
        own = x.abs().amax(-1, keepdim=True) / 127
        rows = torch.clamp(torch.round(x / own), -127, 127).to(torch.int8)
        return torch._int_mm(rows, weight).float() * own * scales + bias

    return run


def close(found: Callable[[], list[Tensor]], expected: Tensor) -> Callable[[], float]:
    """A check of the largest error, against the decoded codes in float64."""

    def check() -> float:
        error = largest(found()[0].double() - expected)
        if not error <= 1e-4 * largest(expected):
            raise AssertionError(f"off by {error}, where the largest is {largest(expected)}")
        return error

    return check


def exact(x: Tensor, linear: nn.Linear, scheme: Scheme) -> Tensor:
    weight = decode(encode(linear.weight, scheme.weights)).double()
    if scheme.activations is not None:
        x = decode(encode(x, scheme.activations))
    return functional.linear(x.double(), weight, linear.bias.double()).detach()


def dynamic(name: str, rows: int, device: torch.device) -> Case:
    model = layer(INPUTS, OUTPUTS, device)
    x = torch.randn(rows, INPUTS, device=device)
    linear: Any = model[0]
    ours = call(converted(model, DYNAMIC), x)
    calls = {
        "pyops": ours,
        "torch fp32": call(model, x),
        "torch in separate operations": call(in_separate_operations(linear), x),
        **rivals(model, x),
    }
    held = converted(model, DYNAMIC)[0]
    rows_of = quantize_rows(x)

    def product() -> list[Tensor]:
        return [int8_product(rows_of.codes, held.codes)]

    calls["product alone"] = product
    vet = {n: resembles(c, ours) for n, c in calls.items() if n not in ("pyops", "product alone")}
    large = rows == ROWS
    return Case(
        "quantized",
        name,
        calls,
        check=close(ours, exact(x, linear, DYNAMIC)),
        device=device,
        flops=2 * rows * INPUTS * OUTPUTS,
        vet=vet,
        targets={
            "torch fp32": 3.0,
            "torch in separate operations": 1.5,
            "torch.ao quantize_dynamic": 1.0,
            "torchao": 1.5,
        }
        if large
        else {},
    )


def one_row(name: str, scheme: Scheme, rows: int, device: torch.device) -> Case:
    model = layer(WIDE, WIDE, device)
    x = torch.randn(rows, WIDE, device=device)
    linear: Any = model[0]
    ours = call(converted(model, scheme), x)
    calls: dict[str, Callable[[], list[Tensor]]] = {"pyops": ours, "torch fp32": call(model, x)}
    bits, integers = scheme.weights.bits, not isinstance(scheme.weights, FP8)
    if device.type == "cpu" and integers:
        calls |= rivals(model, x)
        codes = encode(linear.weight, Int8())
        narrow, scales = x.bfloat16(), codes.scales.bfloat16()
        calls["torch._weight_int8pack_mm"] = lambda: [
            torch._weight_int8pack_mm(narrow, codes.codes, scales)
        ]
    return Case(
        "quantized",
        name,
        calls,
        check=close(ours, exact(x, linear, scheme)),
        device=device,
        bytes_moved=WIDE * WIDE * bits // 8,
        vet={
            n: resembles(c, call(model, x))
            for n, c in calls.items()
            if n.startswith("torch.ao") or n == "torchao"
        },
        targets={"torch fp32": 3.0 if bits == 8 else 4.5} if rows == 1 and integers else {},
    )


def rows_to_codes(name: str, dtype: torch.dtype, device: torch.device) -> Case:
    x = torch.randn(2048, 1024, device=device).to(dtype)

    def separate() -> tuple[Tensor, Tensor]:
        scales = x.float().abs().amax(-1, keepdim=True) / 127
        return torch.clamp(torch.round(x / scales), -127, 127).to(torch.int8), scales

    def check() -> float:
        expected = quantize_rows_reference(x, None, None, symmetric=True)
        for a, e in zip(quantize_rows(x)[:2], expected, strict=False):
            if not torch.equal(a, e):
                raise AssertionError(f"{int((a != e).sum())} of {a.numel()} differ")
        return 0.0

    return Case(
        "quantized",
        name,
        {"pyops": lambda: quantize_rows(x), "torch in separate operations": separate},
        check=check,
        device=device,
        bytes_moved=x.numel() * (x.element_size() + 1),
        targets={"torch in separate operations": 4.0},
        least={"percent_of_copy": 80.0 if device.type == "cpu" else 85.0},
    )


def sums_to_numbers(name: str, device: torch.device) -> Case:
    acc = torch.randint(-99999, 99999, (ROWS, OUTPUTS), device=device).to(torch.int32)
    s, t, bias = (torch.rand(n, device=device) for n in (ROWS, OUTPUTS, OUTPUTS))

    def check() -> float:
        options: dict[str, Any] = {"activation": None, "dtype": torch.float32}
        expected = scale_product_reference(acc, s, t, None, None, bias, **options)
        if not torch.equal(scale_product(acc, s, t, bias=bias), expected):
            raise AssertionError("other bits than the definition's")
        return 0.0

    return Case(
        "quantized",
        name,
        {
            "pyops": lambda: scale_product(acc, s, t, bias=bias),
            "torch in separate operations": lambda: acc.float() * s[:, None] * t + bias,
        },
        check=check,
        device=device,
        bytes_moved=8 * acc.numel(),
        least={"percent_of_copy": 80.0 if device.type == "cpu" else 85.0},
    )


def vision(name: str, device: torch.device) -> Case:
    sizes: dict[str, Any] = {"num_layers": 4, "num_heads": 6, "dim": 384}
    model = ViT(ViTConfig(num_labels=100, image_size=224, patch_size=16, **sizes), seed=0)
    model = model.eval().to(device)
    images = torch.randn(4, 3, 224, 224, device=device)
    ours = call(converted(model, DYNAMIC), images)
    plain = call(model, images)

    def check() -> float:
        error = largest(ours()[0] - plain()[0])
        if not error <= largest(plain()[0]) / 10:
            raise AssertionError(f"off by {error}")
        return error

    return Case(
        "quantized",
        name,
        {"pyops": ours, "pyops fp32": plain},
        check=check,
        device=device,
        targets={"pyops fp32": 2.0 if device.type == "cpu" else 1.3},
    )


def text(name: str, scheme: Scheme, device: torch.device) -> Case:
    config = GPTConfig(
        vocab_size=4096,
        sequence_length=512,
        num_layers=8,
        num_heads=8,
        dim=512,
        hidden=1408,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
    )
    model = GPT(config, seed=0).eval().to(device)
    small = converted(model, scheme)

    def written(by: nn.Module) -> Callable[[], list[Any]]:
        return lambda: list(generate(by, [[1, 2, 3]], max_new=64, temperature=0))

    def check() -> float:
        tokens = torch.arange(64, device=device)[None]
        with torch.no_grad():
            error = largest(small(tokens) - model(tokens))
            if not error <= largest(model(tokens)) / 2:
                raise AssertionError(f"logits off by {error}")
        return error

    return Case(
        "quantized",
        name,
        {"pyops": written(small), "pyops fp32": written(model)},
        check=check,
        device=device,
        targets={"pyops fp32": 2.0 if scheme.weights.bits == 8 else 3.0},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for rows in (ROWS, 64, 1):
        name = f"dynamic int8 linear, {rows} x {INPUTS} x {OUTPUTS}"
        yield name, partial(dynamic, name, rows, device)
    for kind, weights in (("int8", Int8()), ("int4", Int4(group=128)), ("fp8", FP8())):
        for rows in (1, 8):
            name = f"{kind} weights, {rows} row{'s' * (rows > 1)}, {WIDE} x {WIDE}"
            yield name, partial(one_row, name, Scheme(weights), rows, device)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"rows to int8, 2048 x 1024 {str(dtype).removeprefix('torch.')}"
        yield name, partial(rows_to_codes, name, dtype, device)
    name = f"sums to fp32, {ROWS} x {OUTPUTS}"
    yield name, partial(sums_to_numbers, name, device)
    name = "ViT, 4 layers, width 384, 4 images of 224 x 224, all linear layers int8"
    yield name, partial(vision, name, device)
    for scheme in (Scheme(Int8()), Scheme(Int4(group=128))):
        name = f"generate, 8 layers, width 512, 1 row, int{scheme.weights.bits} weights"
        yield name, partial(text, name, scheme, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
