"""Rows of queries, keys and values, attention over them in one process, and over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.context_parallel import ContextRanks, ContextRow, Order
from pyops.ops.attention import (
    AttentionBias,
    AttentionDropout,
    AttentionMask,
    BlockLayout,
    attention,
)

__all__ = ["Case", "alone", "on_rank", "put_together"]

B, K = 2, 8
BUCKETS = 6


@dataclass(frozen=True)
class Case:
    """What attention is asked for."""

    T: int
    S: int | None = None
    """Keys of another row; None: those of the same."""
    H: int = 4
    G: int = 4
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] = ()
    """Lengths of documents, the rest is padding; the second row's are the other way around."""
    keys: bool = False
    p: float = 0.0
    scores: tuple[int, ...] | None = None
    """Of [B, H, T, T] the sizes that are 1."""
    table: bool = False
    slopes: bool = False
    soft_cap: float | None = None
    layout: BlockLayout | None = None
    dtype: torch.dtype = torch.float64
    rounded: torch.dtype = torch.float64
    """What numbers are rounded to before they are of `dtype`."""

    @property
    def num_keys(self) -> int:
        """Of the whole row."""
        return self.T if self.S is None else self.S

    def tensors(self) -> dict[str, Tensor]:
        """What has gradients; each head, row and token is of its own size."""
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            for dim, n in enumerate(shape):
                size = 1 + torch.arange(n, dtype=torch.float64) / 10 / (dim + 1)
                x = x * size.view(-1, *(1,) * (len(shape) - dim - 1)) / (1 + n / 20)
            return x.to(self.rounded).to(self.dtype)

        found = {
            "q": drawn(B, self.T, self.H, K),
            "k": drawn(B, self.num_keys, self.G, K),
            "v": drawn(B, self.num_keys, self.G, K),
        }
        if self.scores is not None:
            whole = (B, self.H, self.T, self.num_keys)
            found["scores"] = drawn(*(1 if i in self.scores else n for i, n in enumerate(whole)))
        if self.table:
            found["table"] = drawn(BUCKETS, self.H)
        return found

    def weights(self) -> Tensor:
        """The gradient of y."""
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(B, self.T, self.H, K, generator=generator, dtype=torch.float64)
        return x.to(self.rounded).to(self.dtype)

    def row_of_documents(self, length: int | None = None) -> Tensor:
        """int32 [B, T]."""
        ids = [i for i, n in enumerate(self.documents) for _ in range(n)]
        other = [i for i, n in enumerate(reversed(self.documents)) for _ in range(n)]
        length = self.T if length is None else length
        rows = [(row + [-1] * length)[:length] for row in (ids, other)]
        return torch.tensor(rows, dtype=torch.int32)

    def options(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The other arguments of attention, for the whole row."""
        keys = None
        if self.keys:
            keys = torch.ones(B, self.num_keys, dtype=torch.bool)
            keys[0, self.num_keys // 3] = keys[1, : self.num_keys // 4] = False
        documents = None
        if self.documents:
            documents = self.row_of_documents()
            if self.S is not None:
                documents = (documents, self.row_of_documents(self.S).flip(0))
        dropout = None
        if self.p:
            dropout = AttentionDropout(p=self.p, state=torch.tensor([11, 5]), first_row=3)
        return {
            "mask": AttentionMask(
                causal=self.causal,
                window=self.window,
                keys=keys,
                documents=documents,
                layout=self.layout,
            ),
            "bias": AttentionBias(
                scores=tensors.get("scores"),
                table=tensors.get("table"),
                max_distance=5,
                bidirectional=False,
                slopes=torch.arange(1, self.H + 1).to(self.dtype) / 7 if self.slopes else None,
            ),
            "soft_cap": self.soft_cap,
            "dropout": dropout,
        }


def alone(case: Case) -> dict[str, Tensor]:
    """y and all gradients in one process."""
    leaves = {name: x.requires_grad_() for name, x in case.tensors().items()}
    y = attention(leaves["q"], leaves["k"], leaves["v"], **case.options(leaves))
    y.backward(case.weights())
    return {"y": y.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}


def on_rank(
    group: Any, case: Case, *, method: str, heads: int | None, order: str | Order
) -> dict[str, Any]:
    """This rank's y and gradients, and the bytes that it received forward and backward."""
    ranks = ContextRanks.of(group, method=method, heads=heads)
    documents = case.row_of_documents() if case.documents else None
    if isinstance(order, str):
        order = Order.of(order, length=case.T, ranks=ranks.size, documents=documents)
    memory = None
    if case.S is not None:
        memory = Order.of("contiguous", length=case.S, ranks=ranks.size)
    row = ContextRow(ranks, order, memory)
    whole = case.tensors()
    orders = {"q": row.order, "k": row.orders[1], "v": row.orders[1]}
    leaves = {
        name: (orders[name].shard(x, rank=ranks.rank) if name in orders else x).requires_grad_()
        for name, x in whole.items()
    }
    y = row.attention(leaves["q"], leaves["k"], leaves["v"], **case.options(leaves))
    wire = ranks.wire
    forward, messages = (wire.bytes_received, wire.messages_received) if wire else (0, 0)
    y.backward(row.shard(case.weights()))
    total, every = (wire.bytes_received, wire.messages_received) if wire else (0, 0)
    return {
        "y": y.detach(),
        **{f"d{name}": x.grad for name, x in leaves.items()},
        "bytes": (forward, total - forward),
        "messages": (messages, every - messages),
        "orders": row.orders,
    }


def put_together(found: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The whole row's, of what ranks found: tokens side by side, others summed."""
    order, memory = found[0]["orders"]
    orders = {"y": order, "dq": order, "dk": memory, "dv": memory}
    return {
        name: orders[name].unshard([each[name] for each in found])
        if name in orders
        else sum(each[name] for each in found)
        for name in found[0]
        if name not in ("bytes", "messages", "orders")
    }
