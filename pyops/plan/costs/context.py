"""What ranks of context parallelism receive for a block, by method, for a row of S tokens on N
ranks; h and g are the widths of queries and of keys on a rank of tp.

| method  | forward                  | backward                          |
|---------|--------------------------|-----------------------------------|
| gather  | 2 S g (N - 1) / N        | the same, and gradients as many   |
| ulysses | (2 h + 2 g) S (N - 1)/N2 | the same                          |
| ring    | 2 S g (N - 1) / N        | the same, and 2 S g in fp32       |

docs/context_parallel.md has the table, tests/context_parallel the bytes counted in runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyops.plan.layout import Layout
from pyops.plan.shapes import ModelShape

__all__ = ["Received", "received"]


@dataclass(frozen=True)
class Received:
    """By a rank, of a row and a block."""

    numbers: float
    """In the precision of the model."""
    in_fp32: float
    """Gradients that travel in fp32."""
    hops: int
    """Messages one after the other."""


def received(shape: ModelShape, layout: Layout, *, backward: bool) -> Received:
    """What a rank receives for a block's attention in a pass.

    Args:
        shape: Of the model.
        layout: With its cp, tp and method.
        backward: Of backward, or of forward.
    """
    n, tokens = layout.cp, shape.sequence_length
    part = (n - 1) / n
    heads = -(-shape.kv_heads // layout.tp)
    keys = heads * shape.head_width
    if layout.cp_method == "ulysses":
        # Fewer heads of keys than ranks are copied to all whose queries see them.
        width = shape.query_width / layout.tp + max(heads, n) * shape.head_width
        return Received(2.0 * width * tokens * part / n, 0.0, 2 * (n - 1))
    around = 2.0 * tokens * keys
    if layout.cp_method == "ring":
        return Received(around * part, around if backward else 0.0, n if backward else n - 1)
    return Received((2.0 if backward else 1.0) * around * part, 0.0, (1 + backward) * (n - 1))
