"""The product of a few rows with a matrix, beside torch's: what generation computes for a token.

Matrices of a model of width 512 and of one of width 4096. `bytes`: the weight, which is read once;
before each round other matrices are read, so that it comes from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.ops.layers.few_rows import linear

__all__ = ["cases", "run"]

# Rows, width, outputs, and how many such matrices are gone through
SHAPES = ((1, 512, 2816, 16), (1, 4096, 4096, 2), (4, 4096, 4096, 2), (8, 4096, 4096, 2))
WIDE = ((16, 4096, 4096, 2), (64, 512, 2816, 16))


def case(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Case:
    rows, width, outputs, count = shape
    x = torch.randn(rows, width, device=device).to(dtype)
    weights = [
        (torch.randn(outputs, width, device=device) / width**0.5).to(dtype) for _ in range(count)
    ]

    def through(product: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [product(x, weight) for weight in weights]

    calls = {"pyops": partial(through, linear), "torch": partial(through, functional.linear)}

    def check() -> None:
        """Both are the product in float64 but for rounding once, and as many additions in fp32 as
        there are columns, whose errors add up like a random walk's steps."""
        exact = functional.linear(x.double(), weights[0].double())
        once = torch.finfo(dtype).eps * float(exact.abs().max())
        bound = once + width**0.5 * torch.finfo(torch.float32).eps
        for call in calls.values():
            torch.testing.assert_close(call()[0].double(), exact, rtol=0, atol=bound)

    return Case(
        "few_rows",
        name,
        calls,
        check=check,
        device=device,
        bytes_moved=count * outputs * width * dtype.itemsize,
        flops=2 * count * rows * outputs * width,
        targets={"torch": 1.5},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES + (WIDE if dtype == torch.float32 else ()):
            rows, width, outputs, count = shape
            name = (
                f"{rows} row{'s' * (rows > 1)} by {count} matrices {outputs} x {width} "
                f"{str(dtype).removeprefix('torch.')}"
            )
            yield name, partial(case, name, shape, dtype, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    return run_cases(
        [make for name, make in cases(options.device) if (options.only or "") in name],
        rounds=options.rounds,
    )
