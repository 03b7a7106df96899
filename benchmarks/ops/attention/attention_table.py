"""Where torch's scaled_dot_product_attention is faster for plain attention, measured and written to
pyops/ops/attention/plain_table.py; `python -m benchmarks.ops.attention.attention_table`.

Of each dtype, width of a head and causality, forward alone and with backward are timed at some
lengths, in turn with torch's. torch's is taken for a length where both were faster in every round
by 5 %, and its gradients no less exact than 1.1 times ours; between two such lengths, and beyond
the longest, it is taken as well. The entries of other kinds of device stay.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.ops.attention.bench_attention import (
    Work,
    gradient_errors,
    our_step,
    torch_attention,
)
from pyops.ops.attention import AttentionMask, plain, plain_table

__all__ = ["main", "ranges_of", "written"]

PATH = Path(plain_table.__file__)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS, LENGTHS, ROUNDS = (64, 128), (128, 512, 2048), 5
BEYOND = 1 << 31  # no row is longer
MARGIN = 1.05
Key = tuple[str, int, bool]
Ranges = tuple[tuple[int, int], ...]


def seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def torchs_is_faster(work: Work) -> bool:
    """In every round, forward alone and with backward, and no less exact."""
    for backward in (False, True):
        each = replace(work, backward=backward)
        ours, theirs = our_step(each), torch_attention(each)
        for call in (ours, theirs):
            call()
        for _ in range(ROUNDS):
            if seconds(ours, work.device) < MARGIN * seconds(theirs, work.device):
                return False
    errors = gradient_errors(replace(work, heads=1))["gradient_errors"]
    return bool(errors["torch"] <= 1.1 * errors["ours"])


def ranges_of(faster: list[tuple[int, bool]]) -> Ranges:
    """From and up to which length torch's is taken, of lengths that were measured, ascending."""
    found = []
    for taken, group in itertools.groupby(faster, key=lambda each: each[1]):
        lengths = [length for length, _ in group]
        if taken:
            last = lengths[-1] if lengths[-1] != faster[-1][0] else BEYOND
            found.append((lengths[0], last))
    return tuple(found)


def measured(device: torch.device) -> dict[Key, Ranges]:
    """Every key, also where nothing is torch's."""
    table = {}
    for dtype, width, causal in itertools.product(DTYPES, WIDTHS, (False, True)):
        faster = []
        for tokens in LENGTHS:
            work = Work(
                tokens,
                8,
                dtype,
                device,
                {"mask": AttentionMask(causal=causal)},
                {"is_causal": causal},
                width=width,
            )
            faster.append((tokens, torchs_is_faster(work)))
        table[str(dtype), width, causal] = ranges_of(faster)
        print(f"{dtype}, {width}, causal {causal}: {faster}", flush=True)
    return table


def written(table: dict[str, dict[Key, Ranges]]) -> str:
    """The module's text."""
    head = PATH.read_text().split("FASTER: dict")[0]
    lines = ["FASTER: dict[str, dict[tuple[str, int, bool], tuple[tuple[int, int], ...]]] = {"]
    for kind, entries in table.items():
        lines.append(f'    "{kind}": {{')
        for (dtype, width, causal), ranges in entries.items():
            lines.append(f'        ("{dtype}", {width}, {causal}): {ranges!r},')
        lines.append("    },")
    return head + "\n".join([*lines, "}"]) + "\n"


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = plain.kind_of(device)
    kept = dict(plain_table.FASTER)
    plain_table.FASTER.clear()
    plain_table.FASTER[kind] = {}  # so that what is timed as ours is ours
    found = measured(device)
    PATH.write_text(written({**kept, kind: found}))
    print(f"{kind} written to {PATH.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
