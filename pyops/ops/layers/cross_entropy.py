"""Softmax cross entropy that reads the logits once forward and once backward, and stores nothing of
their size but a gradient.

    logits [N, V] --- statistics ---> [N, 3]: maximum m, sum of exp(z - m), target's logit
        |                                 (a fourth: sum of z - m)
        |                                |
        |                           loss [N], coefficients [N, 3]       `row_losses`, plain torch
        |                                |
        '------------- gradient <--------'   dz_j = c_0 exp(z_j - m) + c_2, and c_1 more at the
                                             target

    loss = (1 - s) (L - z_y) + s (L - mean of z) + z_loss L^2
    L = log of the sum of exp z,  s label smoothing

Statistics of parts of a vocabulary merge into those of the whole, so the same two kernels serve
logits that several ranks hold (pyops.tensor_parallel). Statistics, losses and coefficients are fp32
for fp32, bf16 and fp16 logits, float64 for float64. Online softmax: Milakov and Gimelshein,
arXiv:1805.02867. Label smoothing: Szegedy et al., arXiv:1512.00567, section 7, as
torch.nn.functional.cross_entropy has it. z-loss: Chowdhery et al., arXiv:2204.02311, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import define

__all__ = [
    "check_options",
    "check_targets",
    "cross_entropy",
    "cross_entropy_gradient",
    "cross_entropy_gradient_reference",
    "cross_entropy_statistics",
    "cross_entropy_statistics_reference",
    "reduce_losses",
    "row_losses",
]

REDUCTIONS = ("mean", "sum", "none")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    in_place: bool = False,
) -> Tensor:
    """The loss of logits [..., V] for targets int64 [...]: classes in the last dimension, otherwise
    as torch's cross_entropy.

    Returns fp32, also for 16-bit logits; float64 for float64. Bytes: one reading of the logits
    forward, one and a writing of the gradient backward. Rows with adjacent columns are taken as
    they are, others are copied first.

    Args:
        ignore_index: rows with this target have no loss and an exactly zero gradient; their logits
            aren't read.
        label_smoothing: the share of the target distribution that is spread evenly over all V
            words. Megatron spreads a over the other V - 1 words; that is label_smoothing = a V / (V
            - 1) here.
        z_loss: this times the square of log(sum of exp z) is added to each row's loss.
        reduction: "mean" over the rows that aren't ignored (nan when all are, with zero gradients),
            "sum", or "none": [...].
        in_place: backward may write the gradient over the logits, so that no second tensor of their
            size exists. Whoever else reads the logits must be done by then; autograd raises where
            it sees otherwise. Without it the logits are never written to.

    Raises:
        ValueError: for shapes that don't fit, options out of range and, for CPU tensors, a target
            that is no word; a CUDA row with such a target has the loss nan, because nothing waits
            for the device.
        TypeError: for other dtypes.
    """
    check_options(
        logits, targets, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction
    )
    check_targets(targets, ignore_index=ignore_index, vocab_size=logits.shape[-1])
    if in_place and logits.is_leaf and logits.requires_grad:
        raise ValueError(
            "in_place=True would write a gradient over a leaf tensor; pass logits that a "
            "layer computed"
        )
    rows, words = logits.reshape(targets.numel(), logits.shape[-1]), targets.reshape(-1)
    in_place = in_place and not torch.compiler.is_compiling()
    losses = _RowLosses.apply(  # type: ignore[no-untyped-call]
        rows, words, ignore_index, label_smoothing, z_loss, in_place
    )
    return reduce_losses(losses, targets, ignore_index=ignore_index, reduction=reduction)


class _RowLosses(torch.autograd.Function):
    """losses [N] of logits [N, V]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        in_place: bool,
    ) -> Tensor:
        vocab_size = logits.shape[1]
        statistics = cross_entropy_statistics(
            logits, targets, ignore_index=ignore_index, with_sum=label_smoothing > 0
        )
        losses, coefficients = row_losses(
            statistics,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            vocab_size=vocab_size,
        )
        ctx.save_for_backward(logits, targets, statistics[:, 0].contiguous(), coefficients)
        ctx.ignore_index, ctx.in_place = ignore_index, in_place
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, targets, maxima, coefficients = ctx.saved_tensors
        gradient = cross_entropy_gradient(
            logits,
            targets,
            maxima,
            coefficients * grads[0][:, None],
            ignore_index=ctx.ignore_index,
            out=logits if ctx.in_place else None,
        )
        return gradient, None, None, None, None, None


def row_losses(
    statistics: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """losses [N] and the coefficients [N, 3] of their gradients, from the statistics [N, 3 or 4] of
    the whole vocabulary.

    A row whose target is no word and isn't ignored has the loss nan.
    """
    maximum, total, at_target = statistics[:, 0], statistics[:, 1], statistics[:, 2]
    log_total = total.log()
    losses = log_total + (maximum - at_target)
    factor = total.reciprocal()
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (
            log_total - statistics[:, 3] / vocab_size
        )
    if z_loss:
        whole = log_total + maximum
        losses = losses + z_loss * whole * whole
        factor = factor * (1 + 2 * z_loss * whole)
    no_word = (targets < 0) | (targets >= vocab_size)
    losses = losses.masked_fill(no_word, torch.nan).masked_fill(targets == ignore_index, 0.0)
    hot, uniform = (
        torch.full_like(factor, label_smoothing - 1),
        torch.full_like(factor, -label_smoothing / vocab_size),
    )
    return losses, torch.stack([factor, hot, uniform], dim=1)


def reduce_losses(losses: Tensor, targets: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """losses [N] as a number, or in the shape of targets."""
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / (targets != ignore_index).sum() if reduction == "mean" else losses.sum()


def check_options(
    rows: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    what: str = "logits",
) -> None:
    """TypeError or ValueError for what no cross entropy takes. rows [..., n], called `what`, are
    what the targets are for."""
    if rows.dtype not in FLOATS:
        raise TypeError(f"{what} must be float32, bfloat16, float16 or float64, got {rows.dtype}")
    if targets.dtype != torch.int64:
        raise TypeError(
            f"targets must be int64, the indices of words, got {targets.dtype}; pass targets.long()"
        )
    if rows.dim() == 0 or rows.shape[:-1] != targets.shape or rows.device != targets.device:
        raise ValueError(
            f"there must be a target for each row of the {what}, on their device: got "
            f"{what} {tuple(rows.shape)} on "
            f"{rows.device} and targets {tuple(targets.shape)} on {targets.device}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it is a share, from 0 to 1")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss is {z_loss}; give a factor of 0 or more, such as 1e-4")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")


def check_targets(targets: Tensor, *, ignore_index: int, vocab_size: int) -> None:
    """ValueError naming a target of a CPU tensor that is neither a word nor ignored."""
    if targets.is_cuda or targets.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = targets.aminmax()
    if low >= 0 and high < vocab_size:
        return
    wrong = ((targets < 0) | (targets >= vocab_size)) & (targets != ignore_index)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target {int(targets[place])} at {list(place)} is no word of a vocabulary "
            f"of {vocab_size}, and ignore_index is "
            f"{ignore_index}; {int(wrong.sum())} of {targets.numel()} targets are so"
        )


# --- the two kernels
# --------------------------------------------------------------------------------------------------


def cross_entropy_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    first_column: int = 0,
    columns: int | None = None,
    with_sum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """[N, 3]: maximum m, sum of exp(z - m) and the target's logit; with_sum [N, 4]: also the sum of
    z - m.

    logits [N, C]: the first `columns` (all by default) are words first_column, first_column + 1,
    ... of a vocabulary, the rest is padding. targets int64 [N]. The target's logit is 0 where
    another rank holds it; an ignored row is (0, 1, 0, 0).

    Args:
        out: where to write them.
    """
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    if out is None:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        out = logits.new_empty(logits.shape[0], 4 if with_sum else 3, dtype=wide)
    torch.ops.pyops.cross_entropy_statistics_.default(
        out,
        logits,
        targets.contiguous(),
        ignore_index=ignore_index,
        first_column=first_column,
        columns=logits.shape[1] if columns is None else columns,
    )
    return out


def cross_entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    maxima: Tensor,
    coefficients: Tensor,
    *,
    ignore_index: int,
    first_column: int = 0,
    columns: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """dz_j = c_0 exp(z_j - m) + c_2, c_1 more at the target; 0 in padding and in ignored rows. [N,
    C] in the logits' dtype.

    maxima [N] are those of the statistics, coefficients [N, 3].

    Args:
        out: where to write it, the logits themselves perhaps.
    """
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    target = torch.empty_like(logits) if out is None else out
    torch.ops.pyops.cross_entropy_gradient_.default(
        target,
        logits,
        targets.contiguous(),
        maxima.contiguous(),
        coefficients.contiguous(),
        ignore_index=ignore_index,
        first_column=first_column,
        columns=logits.shape[1] if columns is None else columns,
    )
    if out is not None and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(
            out
        )  # whoever saved it for a backward must not take it for what it was
    return target


def _local_targets(targets: Tensor, first_column: int, columns: int) -> tuple[Tensor, Tensor]:
    """(columns of the targets, whether they are here)."""
    local = targets - first_column
    here = (local >= 0) & (local < columns)
    return local.masked_fill(~here, 0), here


def cross_entropy_statistics_reference(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    first_column: int,
    columns: int,
) -> None:
    """The meaning of `cross_entropy_statistics_` in plain torch."""
    z = logits[:, :columns].to(out.dtype)
    maximum = z.amax(1) if columns else z.new_full((len(z),), -torch.inf)
    shifted = z - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
    local, here = _local_targets(targets, first_column, columns)
    at_target = z.gather(1, local[:, None])[:, 0] if columns else z.new_zeros(len(z))
    found = [maximum, shifted.exp().sum(1), at_target.masked_fill(~here, 0.0), shifted.sum(1)][
        : out.shape[1]
    ]
    nothing = out.new_tensor([0.0, 1.0, 0.0, 0.0][: out.shape[1]])
    out.copy_(torch.where((targets == ignore_index)[:, None], nothing, torch.stack(found, dim=1)))


def cross_entropy_gradient_reference(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    maxima: Tensor,
    coefficients: Tensor,
    *,
    ignore_index: int,
    first_column: int,
    columns: int,
) -> None:
    """The meaning of `cross_entropy_gradient_` in plain torch."""
    z = logits[:, :columns].to(maxima.dtype)
    factor, hot, uniform = (c[:, None] for c in coefficients.unbind(1))
    gradient = factor * (z - maxima.masked_fill(maxima == -torch.inf, 0.0)[:, None]).exp() + uniform
    local, here = _local_targets(targets, first_column, columns)
    if columns:
        gradient.scatter_add_(1, local[:, None], hot * here[:, None])
    out[:, :columns] = gradient.masked_fill((targets == ignore_index)[:, None], 0.0)
    out[:, columns:] = 0


def _fake_statistics(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    first_column: int,
    columns: int,
) -> None:
    return None


def _fake_gradient(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    maxima: Tensor,
    coefficients: Tensor,
    *,
    ignore_index: int,
    first_column: int,
    columns: int,
) -> None:
    return None


_ROWS, _PLACE = "Tensor logits, Tensor targets", "int ignore_index, int first_column, int columns"
define(
    f"cross_entropy_statistics_(Tensor(a!) out, {_ROWS}, *, {_PLACE}) -> ()",
    reference=cross_entropy_statistics_reference,
    fake=_fake_statistics,
    triton="cross_entropy",
)
define(
    f"cross_entropy_gradient_(Tensor(a!) out, {_ROWS}, Tensor maxima, Tensor "
    f"coefficients, *, {_PLACE}) -> ()",
    reference=cross_entropy_gradient_reference,
    fake=_fake_gradient,
    triton="cross_entropy",
)
