"""What attention over ranks refuses, on every rank alike, before anything is sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from pyops.comm.collectives.transport import exchange_bytes
from pyops.comm.failure import DisagreementError
from pyops.context_parallel.layout_parts import common_block
from pyops.context_parallel.order import Order
from pyops.context_parallel.peers import Wire
from pyops.context_parallel.problem import Problem, pair
from pyops.ops.attention import BlockLayout

__all__ = ["agree_on", "check_layout", "check_row", "described"]

WHO = "context_parallel"
REFUSED = b"refuses!"
WIDTH = 2048


def check_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    orders: tuple[Order, Order],
    problem: Problem,
    *,
    ranks: int,
) -> None:
    """Refuse tensors that are not this rank's part of a row, and what is not of the whole row.

    Args:
        q, k, v: As given.
        orders: Of the row of queries, and of that of keys.
        problem: As given.
        ranks: How many share the row.

    Raises:
        ValueError, TypeError: Naming the value and the fix.
    """
    for order in orders:
        if order.ranks != ranks:
            raise ValueError(
                f"{WHO}: the order is for {order.ranks} ranks, and the group has {ranks}; make it "
                f"by Order.of(..., ranks={ranks})"
            )
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        raise ValueError(
            f"{WHO}: q must be [B, n, H, K], k and v [B, n, G, K]; got {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)}"
        )
    if q.dtype != k.dtype or v.dtype != k.dtype:
        raise TypeError(
            f"{WHO}: q, k and v must be of one dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    T, S = (order.length for order in orders)
    n, m = (order.tokens_of_a_rank for order in orders)
    if q.shape[1] != n:
        raise ValueError(
            f"{WHO}: q has {q.shape[1]} tokens, and a rank's part of {T} is {n}; give "
            "order.shard(x, rank=...) of the whole row, and an order of that row's length"
        )
    if k.shape[1] != m:
        raise ValueError(
            f"{WHO}: k has {k.shape[1]} tokens, and a rank's part of {S} is {m}; keys are the "
            "tokens of q's row, or of that which ContextRow(memory=) says; a cache of keys works "
            "on one rank alone"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{WHO}: {q.shape[2]} query heads are no multiple of {k.shape[2]} heads of keys"
        )
    _check_mask(q.shape[0], (T, S), problem)
    scores = problem.bias.scores
    if scores is not None:
        whole = (q.shape[0], q.shape[2], T, S)
        fits = scores.dim() <= 4 and all(
            m in (1, w) for m, w in zip(scores.shape[::-1], whole[::-1], strict=False)
        )
        if not fits or scores.dim() < 2:
            raise ValueError(
                f"{WHO}: a bias of shape {list(scores.shape)}; it must be that of the whole row, "
                f"broadcastable to [B, H, T, S] = {list(whole)}"
            )
    _check_counters((T, S), problem)


def _check_counters(lengths: tuple[int, int], problem: Problem) -> None:
    """Whether dropout counts by the whole row, or by all of it that is no padding."""
    dropout, mask = problem.dropout, problem.mask
    if dropout is None:
        return
    for i, name in enumerate(("num_queries", "num_keys")):
        given, needed = getattr(dropout, name), lengths[i]
        if given is not None and mask.documents is not None:
            ids = pair(mask)[i]
            real = (ids >= 0).any(0).nonzero() if ids.device.type == "cpu" else None
            needed = given if real is None else int(real.max()) + 1 if len(real) else 0
        if given is not None and not needed <= given <= lengths[i]:
            raise ValueError(
                f"{WHO}: {name} of the dropout is {given}, and the row has {lengths[i]} tokens, "
                f"of which {needed} have counters; leave it out"
            )


def _check_mask(B: int, lengths: tuple[int, int], problem: Problem) -> None:
    (T, S), mask = lengths, problem.mask
    if mask.places is not None:
        raise ValueError(f"{WHO}: mask has places, which the order gives; leave them out")
    if mask.layout is not None and (mask.layout.num_queries, mask.layout.num_keys) != (T, S):
        raise ValueError(
            f"{WHO}: the layout is for {mask.layout.num_queries} queries and "
            f"{mask.layout.num_keys} keys; give that of the whole row, {T} and {S}"
        )
    if mask.keys is not None and tuple(mask.keys.shape) != (B, S):
        raise ValueError(
            f"{WHO}: mask.keys has the shape {list(mask.keys.shape)}; give those of the whole row, "
            f"[{B}, {S}], on every rank"
        )
    if mask.documents is None:
        return
    for ids, n in zip(pair(mask), lengths, strict=True):
        if tuple(ids.shape) != (B, n):
            raise ValueError(
                f"{WHO}: documents have the shape {list(ids.shape)}; give those of the whole "
                f"row, [{B}, {n}], on every rank"
            )


def check_layout(layout: BlockLayout, blocks: Sequence[Sequence[Tensor]], num_heads: int) -> None:
    """Refuse a layout whose blocks ranks do not hold whole, and one of other heads.

    Args:
        layout: Of whole rows.
        blocks: The places of queries, and of keys, that stand together on each rank.
        num_heads: Of q.

    Raises:
        ValueError: Naming the fix.
    """
    if layout.num_heads not in (1, num_heads):
        raise ValueError(
            f"{WHO}: the layout has {layout.num_heads} heads and q has {num_heads}; give it 1, or "
            "one for each"
        )
    if all(len(each) == 1 for each in blocks):
        return  # all tokens are on one rank, in the order of the row
    if common_block(layout.block, [place for each in blocks for place in each]) is None:
        raise ValueError(
            f"{WHO}: a layout of blocks of {layout.block} tokens, and ranks hold "
            f"{len(blocks[0][0])} queries each in stretches that are no blocks of 16 tokens or a "
            "multiple; pad the row to a multiple of 16 x ranks (order 'contiguous') or 32 x ranks "
            "('zigzag'), or take method='ulysses', where every rank has all tokens of some heads"
        )


def described(
    q: Tensor, k: Tensor, orders: tuple[Order, Order], problem: Problem, method: str
) -> dict[str, str]:
    """What all ranks must be given alike, by name."""
    order, other = orders
    mask, bias, dropout = problem.mask, problem.bias, problem.dropout
    found = {
        "method": method,
        "the shape of q": str(list(q.shape)),
        "the shape of k": str(list(k.shape)),
        "the dtype": str(q.dtype),
        "the order": f"of {order.length} tokens (mark {order.mark:08x})",
        "causal": str(mask.causal),
        "window": str(mask.window),
        "scale": repr(problem.scale),
        "soft_cap": repr(problem.soft_cap),
        "the bias": str([None if t is None else list(t.shape) for t in (bias.scores, bias.table)]),
        "dropout": repr(dropout.p if dropout is not None else 0.0),
        "the keys seen": _mark(mask.keys),
        "documents": _mark(pair(mask)[0] if mask.documents is not None else None),
    }
    if other is not order:
        found["the order of keys"] = f"of {other.length} tokens (mark {other.mark:08x})"
    if mask.layout is not None:
        found["the layout"] = f"{mask.layout!r}, {_mark(mask.layout.indices)}"
    if dropout is not None:
        found["the state of dropout"] = _mark(dropout.state)
    return found


def _mark(x: Tensor | None) -> str:
    if x is None or x.device.type != "cpu":
        return "none" if x is None else "given"
    return f"{zlib.crc32(x.detach().contiguous().numpy().tobytes()):08x} of {list(x.shape)}"


def agree_on(options: Mapping[str, str], error: Exception | None, wire: Wire) -> None:
    """All ranks return, or all raise: the error of a rank, or what differs. Collective.

    Two numbers go to each rank; where they differ, the texts follow.

    Args:
        options: Name -> value, of this rank.
        error: Why this rank can take no part.
        wire: To the others.
    """
    text = "\n".join(f"{name}\t{value}" for name, value in options.items())
    mark = REFUSED if error is not None else zlib.crc32(text.encode()).to_bytes(8, "little")
    marks = exchange_bytes(wire.transport, mark, width=8)
    if len(set(marks)) == 1 and error is None:
        return
    own = f"{type(error).__name__}: {error}" if error is not None else text
    payload = own.encode()[:WIDTH].decode(errors="ignore").encode()
    texts = [t.rstrip(b"\0").decode() for t in exchange_bytes(wire.transport, payload, width=WIDTH)]
    if error is not None:
        raise error
    for rank, theirs in enumerate(marks):
        if theirs == REFUSED:
            raise DisagreementError(f"{WHO}: rank {rank} refused: {texts[rank]}", ranks=[rank])
    first = dict(line.split("\t") for line in texts[0].splitlines())
    for rank, other in enumerate(texts):
        values = dict(line.split("\t") for line in other.splitlines())
        for name in {**first, **values}:
            a, b = first.get(name, "not there"), values.get(name, "not there")
            if a != b:
                raise DisagreementError(
                    f"{WHO}: {name} is {a} on rank 0, but {b} on rank {rank}; give all ranks the "
                    "same",
                    ranks=[rank],
                )
