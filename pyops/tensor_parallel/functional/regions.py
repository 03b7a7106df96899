"""Autograd edges between what ranks hold together and what each holds apart: each operator's
backward is another's forward.

                    forward                    backward                   between
    copy            x                          sum of dy over ranks       one tensor -> uses
    reduce          sum of x over ranks        dy                         summands   -> one tensor
    scatter         own part along dim         parts gathered             one tensor -> parts
    gather          parts gathered             reduce_scatter, or, where  parts      -> uses, or
                                               duplicated, own part                     one tensor
    reduce_scatter  own part of the sum        parts gathered             summands   -> parts
    all_to_all      exchange                   exchange back              parts      -> other parts

As linear maps each pair are adjoints: the sum over ranks of <y, dy> is that of <x, dx>, a tensor
that all hold counted once. `gather` must know what follows it. Where each rank goes on with a share
of the work (a column-parallel linear), the gradients that come back are parts of a sum:
reduce_scatter. Where every rank does the same (duplicated=True), each has the whole gradient
already and takes its part; summing there would make it as many times too large as there are ranks.

Tokens under sequence parallelism (Korthikanti et al., 2022): a rank holds rows [r n, (r + 1) n) of
N flattened tokens, where n = ceil(N / ranks), the last ones padded with zeros. `scatter_tokens`,
`gather_tokens` and `reduce_scatter_tokens` pad and cut.

Every function takes `group`, see `RanksLike`; on one rank each returns x itself. Sums of 16-bit
floats are in fp32 and rounded once, in rank order, with the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.compression.refusal import compares
from pyops.comm.failure import DisagreementError, PeerError
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike, pad_rows

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


def copy(x: Tensor, *, group: RanksLike = None) -> Tensor:
    """Marks where x, the same on every rank, enters work that differs by rank.

    Args:
        x: any shape.
        group: see `RanksLike`; so in every function of this module.

    Returns:
        x; its gradient is the sum of the ranks' dy.
    """
    return _apply(x, "copy", Ranks.of(group))


def reduce(x: Tensor, *, group: RanksLike = None) -> Tensor:
    """Returns the sum of the ranks' x, a new tensor on every rank; dx is dy."""
    return _apply(x, "reduce", Ranks.of(group))


def scatter(x: Tensor, *, dim: int = -1, group: RanksLike = None) -> Tensor:
    """Returns this rank's part of x along `dim`; dx is the gathered dy.

    Args:
        x: the same on every rank.
        dim: the dimension that is cut; its size must be a multiple of the ranks.
        group: see `RanksLike`.

    Raises:
        ValueError: the ranks do not divide the size of `dim`.
    """
    ranks = Ranks.of(group)
    _check_parts(x, dim, ranks)
    return _apply(x, "scatter", ranks, dim)


def gather(
    x: Tensor, *, dim: int = -1, duplicated: bool = False, group: RanksLike = None
) -> Tensor:
    """Returns the ranks' x one after the other along `dim`.

    Args:
        x: of the same shape on every rank.
        dim: the dimension along which the parts are put together.
        duplicated: every rank does the same with the result, so that each has its whole gradient,
            and dx is this rank's part of dy. Otherwise each rank uses the result in its own way,
            and dx is this rank's part of the sum of the ranks' dy.
        group: see `RanksLike`.
    """
    return _apply(x, "gather duplicated" if duplicated else "gather", Ranks.of(group), dim)


def reduce_scatter(x: Tensor, *, dim: int = -1, group: RanksLike = None) -> Tensor:
    """Returns this rank's part along `dim` of the sum of the ranks' x; dx is the gathered dy.
    Arguments and errors are those of `scatter`."""
    ranks = Ranks.of(group)
    _check_parts(x, dim, ranks)
    return _apply(x, "reduce_scatter", ranks, dim)


def scatter_tokens(x: Tensor, *, group: RanksLike = None) -> Tensor:
    """Returns this rank's rows [n, ...] of x [N, ...], which is the same on every rank."""
    ranks = Ranks.of(group)
    return _apply(_padded(x, ranks), "scatter", ranks)


def gather_tokens(
    x: Tensor, *, tokens: int | None = None, duplicated: bool = False, group: RanksLike = None
) -> Tensor:
    """Returns the ranks' rows together.

    Args:
        x: [n, ...], this rank's rows.
        tokens: N, the number of rows without padding; None: the padding stays in the result.
        duplicated: as in `gather`.
        group: see `RanksLike`.

    Returns:
        [N, ...], or [ranks * n, ...] where `tokens` is None.

    Raises:
        ValueError: x does not have a rank's rows of that many tokens.
    """
    ranks = Ranks.of(group)
    if tokens is not None and len(x) != ranks.rows_per_rank(tokens):
        raise ValueError(
            f"x has {len(x)} rows, but a rank's part of {tokens} tokens over "
            f"{ranks.size} ranks is {ranks.rows_per_rank(tokens)}"
        )
    whole = gather(x, dim=0, duplicated=duplicated, group=ranks)
    return whole if tokens is None or tokens == len(whole) else whole[:tokens]


def reduce_scatter_tokens(x: Tensor, *, group: RanksLike = None) -> Tensor:
    """Returns this rank's rows [n, ...] of the sum of the ranks' x [N, ...]."""
    ranks = Ranks.of(group)
    return _apply(_padded(x, ranks), "reduce_scatter", ranks)


def all_to_all(
    x: Tensor,
    *,
    sizes: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
    group: RanksLike = None,
) -> Tensor:
    """Sends rows of x to the ranks and returns the rows that the ranks send here, in rank order.

    Args:
        x: [rows, ...]; the rows for rank 0 come first, then those for rank 1, and so on.
        sizes: how many rows go to each rank; None: equally many.
        received: how many rows come from each rank; None: the ranks ask one another, a collective
            of 8 bytes a pair of ranks. Over Gloo they always do, because a message of another
            length would end the process.
        group: see `RanksLike`.

    Raises:
        ValueError: sizes that do not sum up to the rows of x, or rows that the ranks do not divide.
        DisagreementError: on every rank, where some rank's `received` is not what is sent to it.
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
    result: Tensor = _AllToAll.apply(x, sent, tuple(received), ranks)  # type: ignore[no-untyped-call]
    return result


def _equal_sizes(x: Tensor, ranks: Ranks) -> tuple[int, ...]:
    _check_parts(x, 0, ranks)
    return (len(x) // ranks.size,) * ranks.size


def _agreed_sizes(
    sent: Sequence[int], expected: Sequence[int] | None, ranks: Ranks, device: torch.device
) -> tuple[int, ...]:
    """How many rows each rank sends here."""
    unknown = [-1] * ranks.size
    numbers = [*sent, *(unknown if expected is None else expected)]
    gathered = ranks.gather(torch.tensor(numbers, device=device)).wait()
    table = gathered.view(ranks.size, 2, ranks.size).tolist()
    for rank, (_, expects) in enumerate(table):
        coming = [row[0][rank] for row in table]
        if any(n not in (-1, m) for n, m in zip(expects, coming, strict=True)):
            raise DisagreementError(
                f"all_to_all: rank {rank} expects {expects} rows from the ranks, they send "
                f"{coming}; give every rank as `received` what the others give as `sizes`",
                ranks=[rank],
            )
    return tuple(row[0][ranks.rank] for row in table)


def _padded(x: Tensor, ranks: Ranks) -> Tensor:
    return pad_rows(x, ranks.rows_per_rank(len(x)) * ranks.size)


def _check_parts(x: Tensor, dim: int, ranks: Ranks) -> None:
    if x.shape[dim] % ranks.size:
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} is {x.shape[dim]}, which {ranks.size} ranks "
            "do not divide; pad it first"
        )


def _sum(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return ranks.sum_(x.clone(memory_format=torch.contiguous_format)).wait()


def _own_part(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return x.tensor_split(ranks.size, dim)[ranks.rank].contiguous()


def _gathered(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return ranks.gather(x.movedim(dim, 0).contiguous()).wait().movedim(0, dim).contiguous()


def _scattered_sum(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    return ranks.reduce_scatter(x.movedim(dim, 0).contiguous()).wait().movedim(0, dim).contiguous()


_FORWARD: dict[str, Callable[[Tensor, int, Ranks], Tensor]] = {
    "copy": lambda x, dim, ranks: x.view_as(x),
    "reduce": _sum,
    "scatter": _own_part,
    "gather": _gathered,
    "gather duplicated": _gathered,
    "reduce_scatter": _scattered_sum,
}
_BACKWARD = {
    "copy": "reduce",
    "reduce": "copy",
    "scatter": "gather duplicated",
    "gather": "reduce_scatter",
    "gather duplicated": "scatter",
    "reduce_scatter": "gather",
}


class _Region(torch.autograd.Function):
    """One operator of the module's table; its backward is another one, so it can be differentiated
    any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: str, dim: int, ranks: Ranks) -> Tensor:
        ctx.operator, ctx.dim, ctx.ranks = operator, dim, ranks
        return _FORWARD[operator](x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Region.apply(dy, _BACKWARD[ctx.operator], ctx.dim, ctx.ranks), None, None, None  # type: ignore[no-untyped-call]


def _apply(x: Tensor, operator: str, ranks: Ranks, dim: int = 0) -> Tensor:
    """The operator between the ranks; x itself on one rank."""
    if ranks.size == 1:
        return x
    found: Tensor = _Region.apply(x, operator, dim, ranks)  # type: ignore[no-untyped-call]
    return found


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
                dist.all_to_all_single(
                    out, x, list(received), list(sent), group=ranks.process_group
                )
            except RuntimeError as error:
                raise PeerError(-1, error) from error
            return out

        result: Tensor = comm.run(
            call, what=f"all_to_all of {tuple(x.shape)}", tensor=x, async_op=False, direct=x.is_cuda
        )
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        sent, received = ctx.sizes
        return _AllToAll.apply(dy, received, sent, ctx.ranks), None, None, None  # type: ignore[no-untyped-call]
