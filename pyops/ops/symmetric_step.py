"""Adam in ZeRO over symmetric memory: one kernel adds the ranks' gradients, steps this rank's
shard, and stores its parameters into every rank's memory.

    g = round(scale * ((gradients of rank 0 + of rank 1) + ...))    in fp32, rounded once
    Adam                                                            moments and master of the shard
    parameters of every rank = round(p)

The bits are those of reduce-scatter, `adam_from_table_` and all-gather one after the other. Over
the links go, per element of a shard, one gradient read and one parameter written for each other
rank. The kernel: csrc/cuda/communication/symmetric_step.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.communication.reduce import sum_rows_reference
from pyops.ops.communication.symmetric import Peers
from pyops.ops.library import build_info, define, library
from pyops.ops.memory import check_memory
from pyops.ops.optimizers.optim import adam_reference
from pyops.ops.optimizers.step import DEVICE_SCALARS, lists_of
from pyops.ops.optimizers.table import GRAD, PARAM, hidden_operands

__all__ = ["symmetric_adam_from_table_", "symmetric_adam_from_table_reference"]


def symmetric_adam_from_table_(
    table: Tensor,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    peers: Peers,
    lr_tensor: Tensor | None = None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
    *,
    ctas: int,
    scale: float,
    in_fp32: bool,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """`adam_from_table_` on the sum of the ranks' gradients. Collective: a kernel that waits for
    those of the other ranks. A rank that is lost before it came leaves everything as it was.

    Args:
        table: The rows of this rank's shard, without maxima; none where it has none. Their
            gradients and parameters lie in this rank's `grads` and `params`.
        grads, params: Every rank's buffers in symmetric memory, in the order of ranks. The
            gradients stay as they are.
        peers: The ranks; launches that share pads must not overlap.
        lr_tensor, grad_factor, found_inf: As for `adam_`, known before the sum is: no norm of it to
            clip by. found_inf is the same on all ranks.
        ctas: How many CTAs wait for one another; the same on all ranks.
        scale: Of the sum, rounded to fp32.
        in_fp32: Whether Adam gets the sum itself, not rounded to the gradients' dtype.
        lr, beta1, beta2, eps, weight_decay, decoupled, maximize: As for `adam_`.
    """
    torch.ops.pyops.symmetric_adam_from_table_.default(
        table,
        list(grads),
        list(params),
        list(peers.pads),
        peers.failure,
        lr_tensor,
        grad_factor,
        found_inf,
        rank=peers.rank,
        ctas=ctas,
        scale=scale,
        in_fp32=in_fp32,
        timeout_ns=round(peers.timeout * 1e9),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
    )


def _like(mine: Tensor, whole: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """Where `mine` stands in `whole`, of each buffer."""
    at = (mine.data_ptr() - whole.data_ptr()) // mine.element_size()
    if not all(0 <= at <= buffer.numel() - mine.numel() for buffer in (whole, *of)):
        raise ValueError(
            f"symmetric_adam_from_table_: {mine.numel()} elements of the table are no part of this "
            f"rank's buffer of {whole.numel()}; give the buffer that they lie in"
        )
    return [buffer.view(-1)[at : at + mine.numel()] for buffer in of]


def symmetric_adam_from_table_reference(
    table: Tensor,
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    pads: Sequence[Tensor],
    failure: Tensor,
    lr_tensor: Tensor | None,
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
    *,
    rank: int,
    ctas: int,
    scale: float,
    in_fp32: bool,
    timeout_ns: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """The meaning of `symmetric_adam_from_table_` in plain torch, on the CPU, for gradients that
    are there already."""
    lists, offsets = lists_of(table)
    of_all = [_like(mine, params[rank], params) for mine in lists[PARAM]]  # before any change
    sums = []
    for mine in lists[GRAD]:
        total = torch.empty_like(mine, dtype=torch.float32 if in_fp32 else mine.dtype)
        sum_rows_reference(total, _like(mine, grads[rank], grads), scale=scale)
        sums.append(total)
    lists[GRAD] = sums
    p, g, m, v, top, masters, copies, steps = lists[:8]
    adam_reference(
        p,
        g,
        m,
        v,
        top,
        masters,
        copies,
        steps,
        lr_tensor,
        grad_factor,
        found_inf,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        zero_grads=False,
        stochastic_rounding=False,
        seed=0,
        offsets=offsets,
    )
    for mine, everyones in zip(lists[PARAM], of_all, strict=True):
        for theirs in everyones:
            theirs.copy_(mine)


define(
    "symmetric_adam_from_table_(Tensor table, Tensor[] grads, Tensor(a!)[] params, "
    f"Tensor(b!)[] pads, Tensor(c!) failure, {DEVICE_SCALARS}, *, int rank, int ctas, float scale, "
    "bool in_fp32, int timeout_ns, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, bool maximize) -> ()",
    reference=symmetric_adam_from_table_reference,
    fake=hidden_operands("symmetric_adam_from_table_", "optim.adam_"),
)
if build_info()["extension"]:  # no kernel for the CPU, whose ranks share memory in another way
    library.impl(
        "symmetric_adam_from_table_",
        check_memory("symmetric_adam_from_table_", symmetric_adam_from_table_reference),
        "CPU",
    )
