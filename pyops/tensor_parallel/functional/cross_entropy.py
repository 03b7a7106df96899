"""Cross entropy of logits whose vocabulary is cut over ranks: one collective of 12 bytes a token
forward, none backward.

    rank 0   logits [N, words 0 1 2]  --.                                   .--  gradient [N, words 0 1 2]
                                         >-- statistics --> loss, the same --<
    rank 1   logits [N, words 3 4 5]  --'                   on every rank   '--  gradient [N, words 3 4 5]

(Shoeybi et al., 2019, section 3.) Smoothing and mean are over the whole vocabulary, whatever a rank
holds of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.compression.refusal import mistake_of, refuse
from pyops.ops.layers.cross_entropy import (
    check_options,
    check_targets,
    cross_entropy,
    cross_entropy_gradient,
    reduce_losses,
    row_losses,
)
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.functional.vocabulary import Options, VocabularyPart

__all__ = ["refuse_together", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    first_column: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    in_place: bool = False,
) -> Tensor:
    """The loss of this rank's logits [..., C], its columns of the vocabulary, for targets int64
    [...], the same on every rank.

    vocab_size: the real number of words; ranks hold C columns each, in rank order, and those beyond
    vocab_size are padding:
        they don't count, whatever is in them, and their gradient is zero. By default C words on each rank.
    first_column: this rank's first word, for ranks that hold different numbers of columns.
    The other arguments, the result and its errors are those of
    `pyops.ops.cross_entropy.cross_entropy`; the loss has the same bits on every rank. group: None
    is one rank alone.

    Communicates (N + 1) 12 bytes a rank, 16 with label smoothing, twice that for float64; nothing
    in backward.
    A rank's mistake is raised on all ranks: there ValueError or TypeError, on the others a
    DisagreementError. So are parts that don't make up the vocabulary and targets or options that
    differ. On CUDA, where nothing waits for the device, a wrong target makes the row's loss nan on
    every rank, and different shapes are the backend's to notice.
    """
    ranks = Ranks.of(group)

    def check() -> VocabularyPart:
        check_options(
            logits, targets, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction
        )
        part = VocabularyPart.of(
            logits.shape[-1], ranks, vocab_size=vocab_size, first_column=first_column
        )
        check_targets(targets, ignore_index=ignore_index, vocab_size=part.vocab_size)
        if in_place and logits.is_leaf and logits.requires_grad:
            raise ValueError(
                "in_place=True would write a gradient over a leaf tensor; pass logits "
                "that a layer computed"
            )
        return part

    part = refuse_together(check, ranks, tensor=logits, what="vocab_parallel_cross_entropy")
    options = Options(ignore_index, label_smoothing, z_loss)
    if ranks.size == 1 and part.vocab_size == logits.shape[-1]:
        return cross_entropy(
            logits,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            in_place=in_place,
        )
    rows = logits.reshape(targets.numel(), logits.shape[-1])
    losses = _RowLosses.apply(
        rows, targets.reshape(-1), part, options, in_place and not torch.compiler.is_compiling()
    )
    return reduce_losses(losses, targets, ignore_index=ignore_index, reduction=reduction)


def refuse_together(check: Callable[[], Any], ranks: Ranks, *, tensor: Tensor, what: str) -> Any:
    """What `check` returns; what it raises is told to the other ranks, which wait in the collective
    that follows."""
    found: list[Any] = []
    mistake = mistake_of(lambda: found.append(check()))
    if mistake is not None:
        refuse(
            mistake,
            ranks.communicator if ranks.size > 1 else None,
            what=what,
            tensor=tensor,
            async_op=False,
        )
    return found[0]


class _RowLosses(torch.autograd.Function):
    """losses [N] of this rank's logits [N, C]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        part: VocabularyPart,
        options: Options,
        in_place: bool,
    ) -> Tensor:
        statistics = part.statistics(logits, targets, options)
        losses, coefficients = row_losses(
            statistics,
            targets,
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            vocab_size=part.vocab_size,
        )
        ctx.save_for_backward(logits, targets, statistics[:, 0].contiguous(), coefficients)
        ctx.part, ctx.options, ctx.in_place = part, options, in_place
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, targets, maxima, coefficients = ctx.saved_tensors
        gradient = cross_entropy_gradient(
            logits,
            targets,
            maxima,
            coefficients * grads[0][:, None],
            ignore_index=ctx.options.ignore_index,
            first_column=ctx.part.first_column,
            columns=ctx.part.columns,
            out=logits if ctx.in_place else None,
        )
        return gradient, None, None, None, None
