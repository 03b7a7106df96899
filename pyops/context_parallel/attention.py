"""Attention over a row whose tokens are shared out among ranks.

    method     what travels                         the forward pass
    gather     keys and values, to all at once      the bits of one rank
    ulysses    heads for tokens, and back           the bits of one rank
    ring       keys and values, a part at a time    equal up to rounding

`heads=u` with "gather" or "ring" composes two: u neighboring ranks exchange tokens for heads, and
the groups of them gather keys, or pass them around (USP, arXiv:2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.transport import Transport, VirtualTransport
from pyops.context_parallel.checks import agree_on, check_layout, check_row, described
from pyops.context_parallel.gathered import Outer, gathered_attention
from pyops.context_parallel.head_exchange import HeadExchange
from pyops.context_parallel.order import Order
from pyops.context_parallel.peers import Peers, Wire
from pyops.context_parallel.problem import Heads, Problem
from pyops.context_parallel.ring import ring_attention
from pyops.context_parallel.single_token import OnceOfRanks, OnEveryRank
from pyops.mesh import ALONE, Mesh, ProcessGroupLike, resolve
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, attention
from pyops.torch_private import disable_dynamo

__all__ = ["METHODS", "ContextRanks", "ContextRow"]

METHODS = ("gather", "ulysses", "ring")


@dataclass(frozen=True, eq=False)
class ContextRanks:
    """The ranks that share rows of tokens, and how attention goes over them. Make one by
    `ContextRanks.of`.

    Raises:
        ValueError: For another method, or heads that do not fit the ranks.
    """

    wire: Wire | None
    """To the other ranks; None for one rank alone."""
    method: str
    """"gather", "ulysses" or "ring"."""
    heads: int
    """How many neighboring ranks exchange tokens for heads; 1: none."""
    rank: int = field(init=False)
    """This rank's number."""
    size: int = field(init=False)
    """How many ranks there are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", self.wire.rank if self.wire is not None else 0)
        object.__setattr__(self, "size", self.wire.size if self.wire is not None else 1)
        if self.method not in METHODS:
            raise ValueError(
                f"context_parallel: method is {self.method!r}; choose one of {', '.join(METHODS)}"
            )
        fitting = [u for u in range(1, self.size + 1) if self.size % u == 0]
        if self.heads not in fitting:
            raise ValueError(
                f"context_parallel: heads is {self.heads}, which does not divide {self.size} "
                f"ranks; choose one of {', '.join(map(str, fitting))}"
            )
        if self.method == "ulysses" and self.heads != self.size:
            raise ValueError(
                f"context_parallel: heads is {self.heads} with method 'ulysses', which exchanges "
                f"heads among all {self.size} ranks; take method 'gather' or 'ring' to compose two"
            )

    @classmethod
    def of(
        cls,
        group: ProcessGroupLike | Mesh | Transport = None,
        *,
        method: str = "gather",
        heads: int | None = None,
    ) -> ContextRanks:
        """The ranks of a group.

        Args:
            group: Of the ranks that share rows: a process group; a Mesh, for its cp group; None
                for the default group, or one process where torch.distributed is not initialized;
                pyops.mesh.ALONE; or a transport of threads.
            method: "gather", "ulysses" or "ring".
            heads: How many neighboring ranks exchange tokens for heads; None: all with "ulysses",
                none with the others.

        Raises:
            ValueError: For another method, or heads that do not fit the ranks.
        """
        if isinstance(group, VirtualTransport):
            wire: Wire | None = Wire(group)
        else:
            if isinstance(group, Mesh):
                group = group.group("cp") if group.size("cp") > 1 else None
                ranks = group
            else:
                ranks = resolve(group, "context_parallel")  # type: ignore[arg-type]
            wire = None if ranks is None or ranks.size() == 1 else Wire.of(ranks)
        size = wire.size if wire is not None else 1
        return cls(wire, method, heads or (size if method == "ulysses" else 1))

    @property
    def group(self) -> ProcessGroupLike:
        """The process group of the ranks; ALONE for one."""
        return ALONE if self.wire is None else self.wire.group

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextRanks:
        return self  # a copy of a model communicates with the same ranks


@dataclass(frozen=True, eq=False)
class ContextRow:
    """Rows of tokens that ranks share out in one order."""

    ranks: ContextRanks
    """That share them, and the method."""
    order: Order
    """Which tokens each rank holds."""
    memory: Order | None = None
    """Which keys each rank holds, where these are of another row, as in cross-attention; None:
    those of its tokens."""

    @property
    def orders(self) -> tuple[Order, Order]:
        """Of queries, and of keys."""
        return self.order, self.order if self.memory is None else self.memory

    def index(self, *, device: torch.device | str | None = None) -> Tensor:
        """The places of this rank's tokens: int64 [n]."""
        return self.order.index(self.ranks.rank, device=device)

    def shard(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """This rank's tokens of x, which is of the whole row; see `Order.shard`."""
        return self.order.shard(x, rank=self.ranks.rank, dim=dim)

    @disable_dynamo
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        mask: AttentionMask | None = None,
        bias: Tensor | AttentionBias | None = None,
        soft_cap: float | None = None,
        dropout: AttentionDropout | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of the whole row, or of `memory`'s.
        Collective: every rank must call it, forward and backward. torch.compile compiles what is
        around it.

        What concerns tokens is of the whole row and the same on every rank: `mask.documents` and
        `mask.keys` [B, S], the bias [.., T, S], the counters of dropout; S is T but with `memory`.
        Gradients of the bias, and of the parameters that q, k and v come from, are summands:
        their sum over the ranks is the gradient. Differentiable once.

        Args:
            q: [B, n, H, K], the tokens at `index()`, n of T.
            k: [B, m, G, K], of the same tokens, or of those that `memory` gives the rank.
            v: [B, m, G, K].
            scale, soft_cap: As for `pyops.ops.attention.attention`.
            mask: Of the whole row, without places. A layout of blocks goes with every method where
                the order gives each rank whole blocks of 16 tokens or a multiple; else with
                "ulysses".
            bias: Of the whole row; each rank computes with its own queries' rows.
            dropout: Of the whole row: num_queries is T and num_keys S, without their padding.

        Returns:
            [B, n, H, K] in q's dtype.

        Raises:
            ValueError, TypeError: For what does not fit, before anything is sent; the other ranks
                raise a DisagreementError that tells it.
            DisagreementError: On all ranks, where they were given other documents, orders, methods,
                shapes or options.
            CommunicationError: A rank died or stalled; the error names it.
        """
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k, v))
        problem = Problem(
            length=self.order.length,
            num_keys=self.orders[1].length,
            scale=scale if scale is not None else max(q.shape[-1], 1) ** -0.5,
            mask=mask if mask is not None else AttentionMask(),
            bias=bias if isinstance(bias, AttentionBias) else AttentionBias(scores=bias),
            soft_cap=soft_cap,
            dropout=dropout if dropout is not None and dropout.p > 0 else None,
        )
        _check(q, k, v, self, problem)
        return _computed(q, k, v, self, problem)

    def on_every_rank(self, x: Tensor, *, place: int = 0) -> Tensor:
        """The token at a place, from the rank that holds it. Collective, forward alone: backward
        the rank that holds it has the gradient that it finds itself.

        Args:
            x: [B, n, ...], the tokens at `index()`.
            place: In the row.

        Returns:
            [B, ...] on every rank.
        """
        owner, at = self._holder(place)
        wire = self.ranks.wire
        if wire is None:
            return x[:, at]
        found: Tensor = OnEveryRank.apply(x, (owner, at), wire)  # type: ignore[no-untyped-call]
        return found

    def once(self, y: Tensor, *, place: int = 0) -> Tensor:
        """y, which every rank computes alike of the token at a place: on the rank that holds it
        with its gradient, on others with a gradient of zero. So the gradients of parameters that y
        comes from are summands, as all are.

        Args:
            y: Of any shape, such as logits.
            place: In the row.
        """
        found: Tensor = OnceOfRanks.apply(y, self.holds(place))  # type: ignore[no-untyped-call]
        return found

    def holds(self, place: int) -> bool:
        """Whether the token at a place is this rank's."""
        return self._holder(place)[0] == self.ranks.rank

    def _holder(self, place: int) -> tuple[int, int]:
        """The rank that holds a place, and where among its tokens."""
        found = (self.order.places == place).nonzero()
        if len(found) != 1:
            raise ValueError(
                f"place {place} is not one of a row of {self.order.length} tokens; give one from 0 "
                f"to {self.order.length - 1}"
            )
        return int(found[0, 0]), int(found[0, 1])


@lru_cache(maxsize=64)
def _blocks(order: Order, heads: int, device: torch.device) -> tuple[Tensor, ...]:
    """The places that each group of `heads` neighbors holds: of one in the order of its tokens, of
    several in that of the row."""
    places = [order.index(rank, device=device) for rank in range(order.ranks)]
    if heads == 1:
        return tuple(places)
    starts = range(0, order.ranks, heads)
    return tuple(torch.cat(places[i : i + heads]).sort().values for i in starts)


@lru_cache(maxsize=64)
def _positions(order: Order, heads: int, first: int, device: torch.device) -> tuple[Tensor, ...]:
    """Where the tokens of each of the neighbors from rank `first` on stand among those of all of
    them."""
    block = _blocks(order, heads, device)[first // heads]
    places = _blocks(order, 1, device)[first : first + heads]
    return tuple(torch.searchsorted(block, each) for each in places)


@lru_cache(maxsize=64)
def _every_place(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)


def _computed(q: Tensor, k: Tensor, v: Tensor, row: ContextRow, problem: Problem) -> Tensor:
    ranks, u, orders = row.ranks, row.ranks.heads, row.orders
    first = ranks.rank - ranks.rank % u  # of the neighbors that exchange heads
    queries, keys = (_blocks(order, u, q.device) for order in orders)
    exchange = None
    heads = Heads(0, q.shape[2], q.shape[2])
    if u > 1:
        assert ranks.wire is not None
        exchange = HeadExchange(
            Peers(ranks.wire, range(first, first + u)),
            _positions(orders[0], u, first, q.device),
            _positions(orders[1], u, first, q.device),
            q.shape[2],
            k.shape[2],
        )
        heads = exchange.own
        q, k, v = exchange.to_heads(q, k, v)
    if len(queries) == 1:  # all tokens are here
        y = _attention_here(q, k, v, problem.of_heads(heads), (queries[0], keys[0]))
    else:
        assert ranks.wire is not None
        own = queries[first // u]
        outer = Outer(
            Peers(ranks.wire, range(ranks.rank % u, ranks.size, u)),
            own,
            keys,
            _every_place(problem.num_keys, q.device),
            problem.of_heads(heads).of_queries(own),
        )
        over = ring_attention if ranks.method == "ring" else gathered_attention
        y = over(q, k, v, outer)
    return y if exchange is None else exchange.to_tokens(y)


def _attention_here(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, places: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention on one rank: in the order of the row, or, of one rank alone, in its own."""
    if any(bool((each[1:] < each[:-1]).any()) for each in places):
        own = problem.of_queries(places[0])
        return attention(q, k, v, **own.call(*places, whole=False))
    return attention(
        q,
        k,
        v,
        scale=problem.scale,
        mask=problem.mask,
        bias=problem.bias,
        soft_cap=problem.soft_cap,
        dropout=problem.dropout,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, row: ContextRow, problem: Problem) -> None:
    """All ranks return, or all raise."""
    ranks, orders = row.ranks, row.orders
    error: Exception | None = None
    options: dict[str, str] = {}
    try:
        check_row(q, k, v, orders, problem, ranks=ranks.size)
        if problem.mask.layout is not None:
            blocks = [_blocks(order, ranks.heads, q.device) for order in orders]
            check_layout(problem.mask.layout, blocks, q.shape[2])
        if q.shape[2] < ranks.heads:
            fitting = [u for u in range(1, q.shape[2] + 1) if ranks.size % u == 0]
            raise ValueError(
                f"context_parallel: {q.shape[2]} heads can't be exchanged among {ranks.heads} "
                f"ranks; up to {max(fitting)} of {ranks.size} can: method 'gather' or 'ring' with "
                f"heads={max(fitting)}, or fewer ranks of context parallelism"
            )
        options = described(q, k, orders, problem, f"{ranks.method} (heads {ranks.heads})")
    except Exception as caught:
        error = caught
    if ranks.wire is not None and q.device.type == "cpu":
        agree_on(options, error, ranks.wire)
    elif error is not None:
        raise error
