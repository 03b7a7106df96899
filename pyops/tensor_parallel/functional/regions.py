"""Autograd edges between what ranks hold together and what each holds apart: each operator's
backward is another's forward.

                    forward                       backward                      between
    copy            x                             sum of dy over ranks          one tensor   -> a use of it on each rank
    reduce          sum of x over ranks           dy                            parts of a sum -> one tensor
    scatter         own part along dim            parts gathered                one tensor   -> parts
    gather          parts gathered                own part, or reduce_scatter   parts        -> one tensor, or its uses
    reduce_scatter  own part of the ranks' sum    parts gathered                parts of a sum -> parts
    all_to_all      exchange                      exchange back                 parts        -> other parts

As linear maps each pair are adjoints: the sum over ranks of <y, dy> is that of <x, dx>, a tensor
that all hold counted once. `gather` must know what follows it. Where each rank goes on with a share
of the work (a column-parallel linear), the gradients that come back are parts of a sum:
reduce_scatter. Where every rank does the same (duplicated=True), each has the whole gradient
already and takes its part; summing there would make it as many times too large as there are ranks.

Tokens under sequence parallelism (Korthikanti et al., 2022): a rank holds rows [r n, (r + 1) n) of
N flattened tokens, where n = ceil(N / ranks), the last ones padded with zeros. `scatter_tokens`,
`gather_tokens` and `reduce_scatter_tokens` pad and cut.

Every function takes `group`: None is one rank alone, and then each returns x itself. Sums of 16-bit
floats are in fp32 and rounded once, in rank order, with the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.compression.refusal import compares
from pyops.comm.failure import DisagreementError, PeerError
from pyops.tensor_parallel.functional.ranks import Ranks, pad_rows

__all__ = [
    "all_to_all",
    "copy",
    "gather",
    "gather_tokens",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tokens",
    "scatter",
    "scatter_tokens",
]

Group = dist.ProcessGroup | None


def copy(x: Tensor, *, group: Group = None) -> Tensor:
    """x, the same on every rank, for a use that differs by rank; dx is the sum of the ranks' dy."""
    ranks = Ranks.of(group)
    return x if ranks.size == 1 else _Copy.apply(x, ranks)


def reduce(x: Tensor, *, group: Group = None) -> Tensor:
    """The sum of the ranks' x, a new tensor on every rank; dx is dy."""
    ranks = Ranks.of(group)
    return x if ranks.size == 1 else _Reduce.apply(x, ranks)


def scatter(x: Tensor, *, dim: int = -1, group: Group = None) -> Tensor:
    """This rank's part of x along `dim`, whose size must be a multiple of the ranks (ValueError);
    dx is the gathered dy."""
    ranks = Ranks.of(group)
    _check_parts(x, dim, ranks)
    return x if ranks.size == 1 else _Scatter.apply(x, dim, ranks)


def gather(x: Tensor, *, dim: int = -1, duplicated: bool = False, group: Group = None) -> Tensor:
    """The ranks' x, equal in shape, one after the other along `dim`.

    duplicated: every rank does the same with the result, so that each has its whole gradient, and
    dx is its own part of dy. Otherwise ranks use it each in its own way, and dx is this rank's part
    of the sum of the ranks' dy.
    """
    ranks = Ranks.of(group)
    return x if ranks.size == 1 else _Gather.apply(x, dim, duplicated, ranks)


def reduce_scatter(x: Tensor, *, dim: int = -1, group: Group = None) -> Tensor:
    """This rank's part along `dim` of the sum of the ranks' x; dx is the gathered dy. Sizes as in
    `scatter`."""
    ranks = Ranks.of(group)
    _check_parts(x, dim, ranks)
    return x if ranks.size == 1 else _ReduceScatter.apply(x, dim, ranks)


def scatter_tokens(x: Tensor, *, group: Group = None) -> Tensor:
    """[N, ...], the same on every rank -> this rank's [n, ...]."""
    ranks = Ranks.of(group)
    return (
        x
        if ranks.size == 1
        else _Scatter.apply(pad_rows(x, ranks.rows_each(len(x)) * ranks.size), 0, ranks)
    )


def gather_tokens(
    x: Tensor, *, tokens: int | None = None, duplicated: bool = False, group: Group = None
) -> Tensor:
    """This rank's [n, ...] -> [tokens, ...] without the padding; with it when tokens is None.
    `duplicated` as in `gather`."""
    ranks = Ranks.of(group)
    if tokens is not None and len(x) != ranks.rows_each(tokens):
        raise ValueError(
            f"x has {len(x)} rows, but a rank's part of {tokens} tokens over "
            f"{ranks.size} ranks is {ranks.rows_each(tokens)}"
        )
    whole = gather(x, dim=0, duplicated=duplicated, group=group)
    return whole if tokens is None or tokens == len(whole) else whole[:tokens]


def reduce_scatter_tokens(x: Tensor, *, group: Group = None) -> Tensor:
    """[N, ...], a part of a sum on each rank -> this rank's [n, ...] of the sum."""
    ranks = Ranks.of(group)
    return (
        x
        if ranks.size == 1
        else _ReduceScatter.apply(pad_rows(x, ranks.rows_each(len(x)) * ranks.size), 0, ranks)
    )


def all_to_all(
    x: Tensor,
    *,
    sizes: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Rows of x go to the ranks in their order, `sizes[r]` of them to rank r; returns what the
    ranks send here, in rank order.

    sizes: by default equal. received: how many rows come from each rank; by default the ranks ask
    one another, a collective of 8 bytes a pair of ranks. Over Gloo they always do, because a
    message of another length would end the process. ValueError: sizes that don't sum up to the rows
    of x, or unequal default ones. DisagreementError, on every rank, when some rank's `received` is
    not what is sent to it.
    """
    ranks = Ranks.of(group)
    sent = _equal_sizes(x, ranks) if sizes is None else tuple(sizes)
    if len(sent) != ranks.size or min(sent) < 0 or sum(sent) != len(x):
        raise ValueError(
            f"sizes {sent} must be {ranks.size} numbers that sum up to the {len(x)} rows of x"
        )
    if ranks.size == 1:
        return x
    if received is None or compares(ranks.communicator, x):
        received = _agreed_sizes(sent, received, ranks, x.device)
    return _AllToAll.apply(x, sent, tuple(received), ranks)


def _equal_sizes(x: Tensor, ranks: Ranks) -> tuple[int, ...]:
    _check_parts(x, 0, ranks)
    return (len(x) // ranks.size,) * ranks.size


def _agreed_sizes(
    sent: Sequence[int], expected: Sequence[int] | None, ranks: Ranks, device: torch.device
) -> tuple[int, ...]:
    """What each rank sends here."""
    told = [-1] * ranks.size if expected is None else list(expected)
    mine = torch.tensor([*sent, *told], device=device)
    table = ranks.gather(mine).wait().view(ranks.size, 2, ranks.size).tolist()
    for to, (_, wanted) in enumerate(table):
        coming = [row[0][to] for row in table]
        if any(w not in (-1, n) for w, n in zip(wanted, coming, strict=True)):
            raise DisagreementError(
                f"all_to_all: rank {to} expects {wanted} rows from the ranks, they send {coming}",
                ranks=[to],
            )
    return tuple(row[0][ranks.rank] for row in table)


def _check_parts(x: Tensor, dim: int, ranks: Ranks) -> None:
    if x.shape[dim] % ranks.size:
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} is {x.shape[dim]}, which {ranks.size} ranks "
            "do not divide; pad it first"
        )


def _sum(x: Tensor, ranks: Ranks) -> Tensor:
    return ranks.sum_(x.clone(memory_format=torch.contiguous_format)).wait()


def _own_part(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return x.tensor_split(ranks.size, dim)[ranks.rank].contiguous()


def _gathered(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return ranks.gather(x.movedim(dim, 0).contiguous()).wait().movedim(0, dim).contiguous()


def _scattered_sum(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return ranks.reduce_scatter(x.movedim(dim, 0).contiguous()).wait().movedim(0, dim).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return _Reduce.apply(dy, ctx.ranks), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _sum(x, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return _Copy.apply(dy, ctx.ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return _own_part(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(dy, ctx.dim, True, ctx.ranks), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, duplicated: bool, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.duplicated, ctx.ranks = dim, duplicated, ranks
        return _gathered(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        function = _Scatter if ctx.duplicated else _ReduceScatter
        return function.apply(dy, ctx.dim, ctx.ranks), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return _scattered_sum(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(dy, ctx.dim, False, ctx.ranks), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], ranks: Ranks
    ) -> Tensor:
        ctx.sizes, ctx.ranks = (sent, received), ranks
        comm, x = ranks.communicator, x.contiguous()
        out = x.new_empty(sum(received), *x.shape[1:])

        def call(spins: int) -> Tensor:
            comm.count((len(x) - sent[ranks.rank]) * (x[:1].numel() * x.element_size()))
            try:
                dist.all_to_all_single(out, x, list(received), list(sent), group=ranks.group)
            except RuntimeError as error:
                raise PeerError(-1, error) from error
            return out

        return comm.run(
            call, what=f"all_to_all of {tuple(x.shape)}", tensor=x, async_op=False, direct=x.is_cuda
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        sent, received = ctx.sizes
        return _AllToAll.apply(dy, received, sent, ctx.ranks), None, None, None
