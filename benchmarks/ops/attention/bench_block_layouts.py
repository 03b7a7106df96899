"""How long the layouts of block-sparse attention over 64 k tokens take to make, by the kernel and
by operations of torch alone, whose tables must be the same. On a CPU, where layouts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.ops.attention.bench_block_sparse import BLOCK, HEADS, PATTERNS
from pyops.attention import Pattern
from pyops.ops.attention import BlockLayout, block_tables

__all__ = ["layout_cases", "run"]

LONG = 65536  # tokens
TABLES = ("counts", "indices", "full")


def layout_case(name: str, pattern: Pattern, *, causal: bool) -> Case:
    """Of one pattern."""

    def build() -> BlockLayout:
        return pattern.layout(LONG, heads=HEADS, block=BLOCK, causal=causal)

    def without_kernel() -> BlockLayout:
        with mock.patch.object(block_tables, "native", return_value=None):
            return build()

    def check() -> None:
        ours, other = build(), without_kernel()
        tables = [n for n in BlockLayout.__dataclass_fields__ if n.endswith(TABLES)]
        different = [n for n in tables if not torch.equal(getattr(ours, n), getattr(other, n))]
        if len(tables) != 6 or different:
            raise AssertionError(f"tables {different} differ")

    return Case(
        "block_layouts",
        name,
        {"pyops": build, "torch operations": without_kernel},
        check=check,
        most={"ms": 5.0},
        facts={"density": round(build().density, 4)},
    )


def layout_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Each pattern but all blocks, and a union; causal and not."""
    union = {"BigBird or fixed": PATTERNS["BigBird"] | PATTERNS["fixed"]}
    for what, pattern in (PATTERNS | union).items():
        for causal in (False, True):
            name = f"{what}, {LONG // 1024} k tokens{', causal' if causal else ''}"
            if what != "dense":
                yield name, partial(layout_case, name, pattern, causal=causal)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    chosen = [make for name, make in layout_cases() if (options.only or "") in name]
    return run_cases(chosen, rounds=options.rounds)
