"""What few bits cost, and what training and calibration win back: accuracy of digits and loss of
text by bits and by method, with the bytes of the weights and the time that a method takes.

    digits   MLP 64-256-128-10, five seeds, percent of the images held out
    text     the GPT of examples/gpt_small.toml, nats per byte of source text held out

Nothing is timed against a rival: a row is a result of each method.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import torch
from torch import nn

from benchmarks.__main__ import Options
from benchmarks.compress.quantized_models import (
    EXAMPLE,
    GROUP_64,
    OUTLIERS,
    Digits,
    Text,
    accuracy,
    digits_mlp,
    example_gpt,
    layers_error,
    rounded_accuracy,
    text_losses,
    trained_aware,
)
from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, keep_row
from pyops.models import GPT
from pyops.quantized import Int8
from pyops.quantized.calibration import awq
from pyops.quantized.formats import Format
from pyops.quantized.layers import chosen, matrix

__all__ = ["digits_rows", "run", "text_rows"]

SEEDS, BITS = 5, (8, 4, 3, 2)


def weight_bytes(model: nn.Module, format: Format) -> int:
    """Bytes of the codes, packed, and scales of a model's linear layers."""
    total = 0
    for layer in chosen(model, None).values():
        out, inner = matrix(layer).shape
        groups = inner // format.group if format.group else 1
        total += out * inner * format.bits // 8 + 4 * out * groups
    return total


def float_bytes(model: nn.Module) -> int:
    """Bytes of the weights of a model's linear layers."""
    weights = (matrix(layer) for layer in chosen(model, None).values())
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _row(case: str, unit: str, found: dict[str, float], seconds: dict[str, float]) -> Row:
    return {
        "bench": "quantized_accuracy",
        "case": case,
        "device": "cpu",
        "us": {},
        "speedup": {},
        "unit": unit,
        "by_method": found,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "machine": machine.describe(torch.device("cpu")),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def digits_rows() -> Iterator[Row]:
    """Percent by bits: to nearest, after training with quantization in mind, and with learned
    steps; means of five seeds. Seconds: of one seed."""
    digits = Digits.load()
    models = [digits_mlp(digits, seed=seed) for seed in range(SEEDS)]
    exact = round(statistics.mean(accuracy(m, digits) for m in models), 2)
    for bits in BITS:
        found, seconds = {"floating point": exact}, {}
        found["to nearest"] = round(
            statistics.mean(rounded_accuracy(m, digits, bits) for m in models), 2
        )
        for name, learn in (("trained", False), ("trained, learned steps", True)):
            start = time.perf_counter()
            ways = [
                trained_aware(m, digits, bits, seed=seed, learn_steps=learn)
                for seed, m in enumerate(models)
            ]
            found[name] = round(statistics.mean(ways), 2)
            seconds[name] = (time.perf_counter() - start) / SEEDS
        row = _row(f"digits, MLP 64-256-128-10, {bits} bits, {SEEDS} seeds", "%", found, seconds)
        yield row | {"float_bytes": float_bytes(models[0])}


def text_rows(format: Format = GROUP_64, *, steps: int = 700) -> Iterator[Row]:
    """Nats per byte by method."""
    start = time.perf_counter()
    text = Text.load(EXAMPLE.sequence_length, rows=8000, held_out=128)
    model = example_gpt(EXAMPLE, text, steps=steps, batch=8)
    trained = time.perf_counter() - start
    found, seconds = text_losses(model, text, format, examples=64)
    found = {name: round(loss, 4) for name, loss in found.items()}
    exact = {"floating point": found.pop("float")}
    parts = (
        ("int8", ("int8",), Int8()),
        (repr(format), ("nearest", "awq", "gptq", "awq, gptq"), format),
        *(
            (
                f"int8, one input {times} times larger",
                (f"outlier of {times}", f"outlier of {times}, smooth"),
                Int8(),
            )
            for times in OUTLIERS
        ),
    )
    for name, methods, of_weights in parts:
        own = exact | {method: found[method] for method in methods}
        times = {method: seconds[method] for method in methods if method in seconds}
        row = _row(f"text, GPT of 4 layers, {name}", "nats a byte", own, times)
        sizes = {
            "float_bytes": float_bytes(model),
            "weight_bytes": weight_bytes(model, of_weights),
        }
        if "awq" in own:
            row["awq_layers_error"] = awq_layers_error(model, text, format, examples=64)
        yield row | sizes | {"steps": steps, "training_seconds": round(trained, 1)}


def awq_layers_error(model: GPT, text: Text, format: Format, *, examples: int) -> float:
    """The part of the layers' error that is left by AWQ: what its rule can win at most."""
    tokens = [rows[:, :-1] for rows in text.train[:examples].split(8)]
    scaled = copy.deepcopy(model)
    awq(scaled, format, tokens)
    errors = [layers_error(each, tokens, format) for each in (scaled, model)]
    return round(errors[0] / errors[1], 3)


def run(options: Options) -> list[Row]:
    """All rows, or those whose case contains `options.only`."""
    rows = []
    for name, make in (("digits", digits_rows), ("text", text_rows)):
        if options.only is not None and options.only not in name:
            continue
        for row in make():
            print(f"{row['case']}: {row['by_method']} {row['unit']}", flush=True)
            keep_row(row)
            rows.append(row)
    return rows
