"""What attention over ranks sends, and how long it waits for it, by method.

    u = heads, neighbors that exchange tokens for heads; c = N / u groups, outside of them
    S tokens, H and G heads of width K, on each rank of a group H / u and max(G, u) / u of them

    numbers received     forward                                backward
    exchange of heads    2 (H + max(G, u)) K (S / N) (u-1) / u  the same
    gather               2 S max(G, u) / u K (c - 1) / c        twice that
    ring                 2 S max(G, u) / u K (c - 1) / c        the same, and 2 S max(G, u) / u K in
                                                                fp32

Keys of a ring travel while a rank computes with the part at hand, gradients of a part while it
computes those of the next; for all else it waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyops.context_parallel.attention import METHODS
from pyops.context_parallel.head_exchange import copied_heads
from pyops.context_parallel.peers import wide_dtype

__all__ = ["AttentionShape", "ContextCost", "Pass", "context_cost"]


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer.

    Raises:
        ValueError: A size is less than 1, or heads of keys do not divide those of queries.
    """

    length: int
    """Tokens of a row of queries."""
    num_heads: int
    """Of queries."""
    head_dim: int
    """Width of a head."""
    num_kv_heads: int = 0
    """Of keys and values; 0: num_heads."""
    num_keys: int = 0
    """Tokens of a row of keys, in cross-attention; 0: length."""
    rows: int = 1
    """Of the batch."""
    dtype: torch.dtype = torch.bfloat16
    """Of queries, keys and values."""

    def __post_init__(self) -> None:
        for name in ("length", "num_heads", "head_dim", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("num_kv_heads", "num_keys"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads = "
                f"{self.num_heads}; give a divisor"
            )

    @property
    def kv_heads(self) -> int:
        """Heads of keys."""
        return self.num_kv_heads or self.num_heads

    @property
    def keys(self) -> int:
        """Tokens of a row of keys."""
        return self.num_keys or self.length


@dataclass(frozen=True)
class Pass:
    """What the rank that receives most receives in one pass, forward or backward."""

    received_bytes: int
    """Of all messages."""
    messages: int
    """How many."""
    waits: int
    """Exchanges one after another for which the rank waits."""
    hidden: tuple[int, ...] = ()
    """Of `received_bytes`, those that travel while it computes, for each of the equal parts in
    which it does: of a ring. (): it computes at once."""

    def seconds(self, *, bandwidth: float, latency: float = 0.0, compute: float = 0.0) -> float:
        """How long the pass takes.

        Args:
            bandwidth: Bytes in a second that a rank receives, while it sends as many.
            latency: Seconds of one exchange, however short.
            compute: Seconds that the rank computes.
        """
        waited = (self.received_bytes - sum(self.hidden)) / bandwidth + self.waits * latency
        if not self.hidden:
            return waited + compute
        part = compute / len(self.hidden)
        return waited + sum(
            max(part, number / bandwidth + latency if number else 0.0) for number in self.hidden
        )


@dataclass(frozen=True)
class ContextCost:
    """What attention of one layer sends over ranks."""

    forward: Pass
    """Of queries, keys and values, and of the result."""
    backward: Pass
    """Of these again, and of their gradients."""

    @property
    def received_bytes(self) -> int:
        """Of both passes."""
        return self.forward.received_bytes + self.backward.received_bytes

    def seconds(
        self, *, bandwidth: float, latency: float = 0.0, compute: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """How long both passes take.

        Args:
            bandwidth: See `Pass.seconds`.
            latency: See `Pass.seconds`.
            compute: Seconds that a rank computes forward, and backward.
        """
        forward, backward = (
            each.seconds(bandwidth=bandwidth, latency=latency, compute=seconds)
            for each, seconds in zip((self.forward, self.backward), compute, strict=True)
        )
        return forward + backward


def context_cost(
    shape: AttentionShape, *, ranks: int, method: str, heads: int | None = None
) -> ContextCost:
    """What a method sends; see the module for the formulas, which are exact.

    Args:
        shape: Of the attention.
        ranks: That share the rows.
        method: "gather", "ulysses" or "ring".
        heads: Neighbors that exchange tokens for heads; None: all with "ulysses", none with the
            others.

    Raises:
        ValueError: For another method, heads that do not fit, or rows that the ranks do not divide.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(METHODS)}")
    u = heads or (ranks if method == "ulysses" else 1)
    if ranks < 1 or ranks % u or u > shape.num_heads or (method == "ulysses" and u != ranks):
        raise ValueError(
            f"heads is {u} of {ranks} ranks and {shape.num_heads} heads; it must divide the ranks, "
            "be no more than the heads, and be all ranks with method 'ulysses'"
        )
    for name, tokens in (("length", shape.length), ("num_keys", shape.keys)):
        if tokens % ranks:
            raise ValueError(f"{name} is {tokens}, which {ranks} ranks do not divide; pad the rows")
    inner, own_kv = _exchange(shape, ranks=ranks, u=u)
    c, size = ranks // u, shape.dtype.itemsize
    if c == 1:
        return inner
    block = 2 * shape.rows * shape.keys // c * own_kv * shape.head_dim  # keys and values of a group
    keys = block * size * (c - 1)
    if method == "gather":
        forward, backward = Pass(keys, c - 1, 1), Pass(2 * keys, 2 * (c - 1), 2)
    else:
        part, sums = block * size, block * wide_dtype(shape.dtype).itemsize
        forward = Pass(keys, c - 1, 0, (part,) * (c - 1) + (0,))
        hidden = (part, *(part + sums,) * (c - 2), sums)
        backward = Pass(keys + c * sums, 2 * c - 1, 1, hidden)
    return ContextCost(_sum(inner.forward, forward), _sum(inner.backward, backward))


def _exchange(shape: AttentionShape, *, ranks: int, u: int) -> tuple[ContextCost, int]:
    """The exchange of tokens for heads and back; and the most heads of keys that a rank has then:
    one for each query head, where these do not share them evenly."""
    H, each = shape.num_heads, shape.num_heads // shape.kv_heads
    cuts = [(r * H // u, (r + 1) * H // u) for r in range(u)]
    kv = [(stop - 1) // each - start // each + 1 for start, stop in cuts]
    n, m = shape.length // ranks, shape.keys // ranks
    if u == 1:
        return ContextCost(Pass(0, 0, 0), Pass(0, 0, 0)), kv[0]
    own = [stop - start for start, stop in cuts]
    # Queries of own heads, or gradients of their results; results of others', or their gradients.
    queries = [n * ((u - 1) * heads + H - heads) for heads in own]
    forward = [x + 2 * m * (u - 1) * heads for x, heads in zip(queries, kv, strict=True)]
    backward = [x + 2 * m * (sum(kv) - heads) for x, heads in zip(queries, kv, strict=True)]
    size = shape.rows * shape.head_dim * shape.dtype.itemsize
    passes = (Pass(size * max(numbers), 2 * (u - 1), 2) for numbers in (forward, backward))
    copied = (copied_heads(start, stop, each) for start, stop in cuts)
    return ContextCost(*passes), max(
        shared if copies is None else len(copies) for shared, copies in zip(kv, copied, strict=True)
    )


def _sum(a: Pass, b: Pass) -> Pass:
    return Pass(
        a.received_bytes + b.received_bytes,
        a.messages + b.messages,
        a.waits + b.waits,
        a.hidden + b.hidden,
    )
