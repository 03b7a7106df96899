"""Cross entropy of logits whose vocabulary is cut over ranks: one collective of 12 bytes a token
forward, none backward.

    rank 0   logits [N, words 0 1 2] --.                               .-- gradient [N, words 0 1 2]
                                        >-- statistics --> one loss --<
    rank 1   logits [N, words 3 4 5] --'                               '-- gradient [N, words 3 4 5]

(Shoeybi et al., 2019, section 3.) Smoothing and mean are over the whole vocabulary, whatever a rank
holds of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
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
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.losses.vocabulary_part import (
    CrossEntropyConfig,
    RowOptions,
    VocabularyPart,
)
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["refuse_together", "vocab_parallel_cross_entropy"]

T = TypeVar("T")


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: RanksLike = None,
    reduction: str = "mean",
    in_place: bool = False,
    config: CrossEntropyConfig | None = None,
    **moved: NoReturn,
) -> Tensor:
    """The cross entropy of logits of which each rank has its columns of the vocabulary.

    Communicates (N + 1) 12 bytes a rank for N targets, 16 with label smoothing, twice that for
    float64; nothing in backward.

    Args:
        logits: [..., C], this rank's columns, floating point.
        targets: [...] int64, words of the whole vocabulary, the same on every rank.
        group: see `RanksLike`.
        reduction: "mean" over the targets that count, "sum", or "none" for losses [...].
        in_place: backward writes the gradient over the logits, which must not be used afterwards.
        config: see `CrossEntropyConfig`; None: its defaults.

    Returns:
        The loss in nats, fp32 (fp64 for fp64 logits), with the same bits on every rank.

    Raises:
        ValueError, TypeError: on the rank whose arguments are wrong, before anything is sent.
        DisagreementError: on the other ranks then; on every rank where their parts do not make up
            the vocabulary, or their targets or options differ. On CUDA, where nothing waits for the
            device, a wrong target makes the row's loss nan on every rank, and different shapes are
            the backend's to notice.
    """
    if moved:
        refuse_keywords("vocab_parallel_cross_entropy", moved, CrossEntropyConfig)
    options = config or CrossEntropyConfig()
    ranks = Ranks.of(group)

    def check() -> VocabularyPart:
        check_options(
            logits,
            targets,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            reduction=reduction,
        )
        part = VocabularyPart.of(
            logits.shape[-1],
            ranks,
            vocab_size=options.vocab_size,
            first_column=options.first_column,
        )
        check_targets(targets, ignore_index=options.ignore_index, vocab_size=part.vocab_size)
        if in_place and logits.is_leaf and logits.requires_grad:
            raise ValueError(
                "in_place=True would write a gradient over a leaf tensor; pass logits "
                "that a layer computed"
            )
        return part

    part = refuse_together(check, ranks, tensor=logits, what="vocab_parallel_cross_entropy")
    if ranks.size == 1 and part.vocab_size == logits.shape[-1]:
        return cross_entropy(
            logits,
            targets,
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            reduction=reduction,
            in_place=in_place,
        )
    rows = logits.reshape(targets.numel(), logits.shape[-1])
    overwrite = in_place and not torch.compiler.is_compiling()
    losses = _RowLosses.apply(rows, targets.reshape(-1), part, options.row_options(), overwrite)  # type: ignore[no-untyped-call]
    return reduce_losses(losses, targets, ignore_index=options.ignore_index, reduction=reduction)


def refuse_together(check: Callable[[], T], ranks: Ranks, *, tensor: Tensor, what: str) -> T:
    """What `check` returns; what it raises is raised on the other ranks too, which wait in the
    collective that follows."""
    found: list[T] = []
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
        options: RowOptions,
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
