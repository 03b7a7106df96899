"""The mean of gradients at low rank: PowerSGD's two exchanges and what becomes of their results.

    U = gradient + error             [n, m], each rank's own; M is the mean of U over the ranks
    P = mean of U Q                  [n, r]     collective 1, with the tensors too small to gain
    P = orthonormal(P)
    Q = mean of U^T P                [m, r]     collective 2
    out = P Q^T,  error = U - out    out is M projected onto the columns of P

The Q of one step, its columns scaled to length 1, is where the next begins: one power iteration a
step, so P turns to the strongest directions of the gradients. Vogels, Karimireddy, Jaggi, PowerSGD,
NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from pyops.comm.compression.power_sgd.low_rank import (
    orthonormal,
    product,
    squared_lengths,
    unit_columns,
)
from pyops.comm.compression.power_sgd.memory import PowerSGDMemory

__all__ = ["low_rank_mean"]


def low_rank_mean(
    flat: Tensor, memory: PowerSGDMemory, *, exchange: Callable[[Tensor], None], factor: float = 1.0
) -> None:
    """flat = factor * (mean over ranks of flat + error, at low rank), in place; the error becomes
    what was left out.

    Args:
        flat: Laid out as memory.layout; padding stays as it is. exchange(x): x = mean of x over the
            ranks, fp32, the same bits everywhere. A matrix whose P or Q is not finite on any rank
            becomes nan, and its error and directions stay as they were.
    """
    if flat.dtype != torch.float32:
        wide = flat.float()
        low_rank_mean(wide, memory, exchange=exchange, factor=factor)
        flat.copy_(wide)
        return
    families, exact = memory.families, memory.exact_parts(flat)
    lengths = [part.numel() for part in exact]
    message, (mean, *ps) = _message(
        flat, [(sum(lengths),), *((len(f.members), f.rank, f.rows) for f in families)]
    )
    if exact:
        torch.cat(exact, out=mean)
    for q, p, cut in zip(memory.bases, ps, memory.pieces, strict=True):
        for piece in cut:
            u = piece.matrices(flat).add_(
                piece.matrices(memory.worker)
            )  # the gradients' own memory, in place
            torch.bmm(piece.right(q), u.transpose(1, 2), out=piece.left(p))
    if message.numel():
        exchange(message)
    # What is not finite here makes all of its matrix's Q nan.
    ps = [orthonormal(p) for p in ps]
    message_q, qs = _message(flat, [(len(f.members), f.rank, f.columns) for f in families])
    for p, q, batches in zip(ps, qs, memory.batches, strict=True):
        for batch in batches:
            torch.bmm(batch.left(p), batch.matrices(flat), out=batch.right(q))
    if families:
        exchange(message_q)
    if exact:
        if not bool(mean.isfinite().all()):
            memory.overflowed.fill_(1.0)
        torch._foreach_copy_(exact, mean.mul_(factor).split(lengths))
    _put_products(flat, memory, ps, qs, scratch=message.new_empty(memory.scratch), factor=factor)


def _put_products(
    flat: Tensor,
    memory: PowerSGDMemory,
    ps: Sequence[Tensor],
    qs: Sequence[Tensor],
    *,
    scratch: Tensor,
    factor: float,
) -> None:
    """flat = factor * P Q^T of every family; errors become what that leaves out, and Q the next
    directions."""
    squares = [squared_lengths(q) for q in qs]
    fine = bool(torch.cat([each.flatten() for each in squares]).isfinite().all()) if qs else True
    for i, (p, q) in enumerate(zip(ps, qs, strict=True)):
        rescued = [] if fine else _not_finite(flat, memory, i, squares[i])
        for piece in memory.pieces[i]:
            u, error = piece.matrices(flat), piece.matrices(memory.worker)
            _put_product(u, error, piece.left(p), piece.right(q), scratch=scratch, factor=factor)
        basis = unit_columns(q, fresh=memory.bases[i], squares=squares[i])
        for member, u, error, before in rescued:
            u.fill_(torch.nan)
            error.copy_(before)
            basis[member] = memory.bases[i][member]
            memory.overflowed.fill_(1.0)
        memory.bases[i] = basis


def _not_finite(
    flat: Tensor, memory: PowerSGDMemory, number: int, squares: Tensor
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """Of each matrix of a family whose P or Q is not finite: its number there, U, error, and a copy
    of the error."""
    ruined = (~squares.isfinite()).any(dim=1).nonzero().flatten().tolist()
    places = [(i, memory.layout.slice_at(memory.families[number].members[i])) for i in ruined]
    return [
        (i, flat[place], memory.worker[place], memory.worker[place].clone()) for i, place in places
    ]


def _put_product(
    u: Tensor, error: Tensor, p: Tensor, q: Tensor, *, scratch: Tensor, factor: float
) -> None:
    """error = U - P Q^T and U = factor * P Q^T, of a piece: U [k, n, m], P [k, r, n], Q [k, r,
    m]."""
    if p.shape[1] == 1:  # the product is as fast made twice as kept
        column = p.transpose(1, 2)
        torch.addcmul(u, column, q, value=-1.0, out=error)
        torch.mul(column, q if factor == 1.0 else q * factor, out=u)
    else:
        mean = product(p, q, out=scratch[: u.numel()].view(u.shape))
        torch.sub(u, mean, out=error)
        torch.mul(mean, factor, out=u)


def _message(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """One fp32 tensor for an exchange, and its parts of these shapes as views."""
    sizes = [prod(shape) for shape in shapes]
    message = torch.empty(sum(sizes), dtype=torch.float32, device=like.device)
    return message, [
        part.view(shape) for part, shape in zip(message.split(sizes), shapes, strict=True)
    ] if sizes else []
