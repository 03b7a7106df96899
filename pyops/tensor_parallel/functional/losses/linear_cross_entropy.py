"""A linear layer and its cross entropy in one: the logits exist for a chunk of tokens at a time,
and so does their gradient.

    hidden [N, H]   chunk 0 --> logits [n, C] --> losses
                    chunk 1                   --> gradient, --> d hidden of the chunk
                    ...                           over them --> d weight, d bias, added up in fp32

Where C is a part of the vocabulary, one small gather completes each chunk's losses, see
vocabulary_part.py.

For a sum or a mean the gradients are computed in the forward pass, as if the loss's own gradient
were 1, and backward multiplies them by what it is: 6 N H V operations, no logits kept and none
computed twice. For single losses, whose gradients differ by token, backward computes each chunk's
logits again: 8 N H V. Nothing waits for the device.

Liger (Hsu et al., arXiv:2410.10989, section 3.2) computes gradients in chunks so; it sums the
weight's in 16 bits by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers.cross_entropy import (
    check_options,
    check_targets,
    cross_entropy_gradient,
    reduce_losses,
    row_losses,
)
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.losses.cross_entropy import refuse_together
from pyops.tensor_parallel.functional.losses.head_gradients import (
    HeadGradients,
    cast_head,
    check_head,
    in_parameter_dtype,
    scale_,
)
from pyops.tensor_parallel.functional.losses.vocabulary_part import (
    CrossEntropyConfig,
    RowOptions,
    VocabularyPart,
)
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["LinearCrossEntropyConfig", "linear_cross_entropy"]

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}  # of a chunk's logits


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropyConfig(CrossEntropyConfig):
    """Options of `linear_cross_entropy`."""

    chunk_tokens: int | None = None
    """Number of tokens whose logits exist at a time; None: as many as fill 32 MiB on the CPU, 1 GiB
    on CUDA. The loss does not depend on it but for the order of its sum."""
    reduce_hidden: bool = True
    """Sum the gradient of hidden over the ranks here, in fp32, while the weight's product is
    computed. False leaves each rank its part, for a region operator before this that sums."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    group: RanksLike = None,
    reduction: str = "mean",
    config: LinearCrossEntropyConfig | None = None,
    **moved: NoReturn,
) -> Tensor:
    """vocab_parallel_cross_entropy(linear(hidden, weight, bias), targets) without whole logits.

    The gradients of weight and bias are added up in fp32; where the weight has an fp32 `main_grad`,
    its gradient is added to that, and weight.grad stays None. Gradients of what does not require
    any, or under no_grad, are not computed. Peak memory beside the gradients themselves: one
    chunk's logits. Communicates 12 bytes a token, as `vocab_parallel_cross_entropy`, and the
    gradient of hidden.

    Args:
        hidden: [..., H], the same on every rank.
        weight: [C, H], this rank's words, of the dtype of hidden unless under autocast.
        targets: [...] int64, words of the whole vocabulary, the same on every rank.
        bias: [C], or None.
        group: see `RanksLike`.
        reduction: "mean" over the targets that count, "sum", or "none" for losses [...], whose
            backward computes the logits again.
        config: see `LinearCrossEntropyConfig`; None: its defaults.

    Returns:
        The loss in nats, fp32 (fp64 for fp64 hidden), with the same bits on every rank.

    Raises:
        ValueError, TypeError, DisagreementError: as `vocab_parallel_cross_entropy`.
    """
    if moved:
        refuse_keywords("linear_cross_entropy", moved, LinearCrossEntropyConfig)
    ranks, options = Ranks.of(group), config or LinearCrossEntropyConfig()

    def check() -> VocabularyPart:
        check_options(
            hidden,
            targets,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            reduction=reduction,
            what="hidden",
        )
        check_head(hidden, weight, bias)
        if options.chunk_tokens is not None and options.chunk_tokens < 1:
            raise ValueError(
                f"chunk_tokens is {options.chunk_tokens}; give 1 or more, or None for the default"
            )
        part = VocabularyPart.of(
            len(weight), ranks, vocab_size=options.vocab_size, first_column=options.first_column
        )
        check_targets(targets, ignore_index=options.ignore_index, vocab_size=part.vocab_size)
        return part

    part = refuse_together(check, ranks, tensor=hidden, what="linear_cross_entropy")
    x, w, b = cast_head(hidden, weight, bias)
    chunks = _Chunks(
        part,
        options.row_options(),
        _chunk_size(x, part, options.chunk_tokens),
        reduce_hidden=options.reduce_hidden and ranks.size > 1,
        with_gradients=torch.is_grad_enabled(),
    )
    rows, words = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)
    main_grad = getattr(weight, "main_grad", None)
    if reduction == "none":
        losses = _LossOfEach.apply(rows, w, b, words, chunks, main_grad)  # type: ignore[no-untyped-call]
        return reduce_losses(
            losses, targets, ignore_index=options.ignore_index, reduction=reduction
        )
    total: Tensor = _LossOfAll.apply(rows, w, b, words, chunks, main_grad)  # type: ignore[no-untyped-call]
    if reduction == "sum":
        return total
    count = (words != options.ignore_index).sum()
    # The mean of nothing is nan, and its gradient zero: dividing by zero would make it nan too.
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _chunk_size(x: Tensor, part: VocabularyPart, chunk_tokens: int | None) -> int:
    """Tokens of a chunk, the same on every rank, whatever part of the vocabulary each holds; the
    last one may be shorter."""
    tokens = max(1, x.shape[:-1].numel())
    if chunk_tokens is None:
        row_bytes = -(-part.vocab_size // part.ranks.size) * x.element_size()
        most = max(1, CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cuda"]) // row_bytes)
        chunks = -(-tokens // most)
        return -(-tokens // chunks)
    return min(chunk_tokens, tokens)


@dataclass(frozen=True)
class _Chunks:
    """The chunks of tokens, and what is computed of the logits of one."""

    part: VocabularyPart
    options: RowOptions
    size: int
    reduce_hidden: bool
    with_gradients: bool

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """(start, stop) of each chunk."""
        return [(start, min(start + self.size, tokens)) for start in range(0, tokens, self.size)]

    def gradients(self, rows: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> HeadGradients:
        """Those of the layer, before the first chunk is added."""
        return HeadGradients(
            rows, weight, needs, ranks=self.part.ranks, reduce_hidden=self.reduce_hidden
        )

    def losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """losses [n], maxima [n], coefficients [n, 3]."""
        statistics = self.part.statistics(logits, targets, self.options)
        losses, coefficients = row_losses(
            statistics,
            targets,
            ignore_index=self.options.ignore_index,
            label_smoothing=self.options.label_smoothing,
            z_loss=self.options.z_loss,
            vocab_size=self.part.vocab_size,
        )
        return losses, statistics[:, 0], coefficients

    def gradient_(
        self, logits: Tensor, targets: Tensor, maxima: Tensor, coefficients: Tensor
    ) -> None:
        """Writes the gradient over the logits [n, C]."""
        cross_entropy_gradient(
            logits,
            targets,
            maxima,
            coefficients,
            ignore_index=self.options.ignore_index,
            first_column=self.part.first_column,
            columns=self.part.columns,
            out=logits,
        )


class _LossOfAll(torch.autograd.Function):
    """The sum of the losses of hidden [N, H]; gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunks: _Chunks,
        main_grad: Tensor | None,
    ) -> Tensor:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        needs = tuple(need and chunks.with_gradients for need in ctx.needs_input_grad[:3])
        total = rows.new_zeros((), dtype=wide)
        gradients = chunks.gradients(rows, weight, needs)
        with torch.autocast(rows.device.type, enabled=False):
            for start, stop in chunks.spans(len(rows)):
                words = targets[start:stop]
                logits = functional.linear(rows[start:stop], weight, bias)
                losses, maxima, coefficients = chunks.losses(logits, words)
                # Not in place: torch.compile of torch 2.11 would lose the gradient of total.
                total = total + losses.sum()
                if any(needs):
                    chunks.gradient_(logits, words, maxima, coefficients)
                    gradients.add(start, stop, logits)
                del logits  # before the next chunk's are made
            gradients.finish()
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtype, ctx.main_grad = weight.dtype, main_grad
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Scaled where they are: autograd refuses a second backward, which would find them changed.
        hidden, weight, bias = ctx.saved_tensors
        hidden, bias = (None if x is None else scale_(x, grads[0]) for x in (hidden, bias))
        if weight is not None and ctx.main_grad is None and weight.dtype != ctx.dtype:
            # Multiplied and rounded in one pass over the largest tensor there is.
            weight = torch.mul(
                weight, grads[0].reshape(1), out=torch.empty_like(weight, dtype=ctx.dtype)
            )
        elif weight is not None:
            weight = scale_(weight, grads[0])
        return (
            *in_parameter_dtype(hidden, weight, bias, dtype=ctx.dtype, main_grad=ctx.main_grad),
            None,
            None,
            None,
        )


class _LossOfEach(torch.autograd.Function):
    """losses [N] of hidden [N, H]; the logits are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunks: _Chunks,
        main_grad: Tensor | None,
    ) -> Tensor:
        found = []
        with torch.autocast(rows.device.type, enabled=False):
            for start, stop in chunks.spans(len(rows)):
                logits = functional.linear(rows[start:stop], weight, bias)
                found.append(chunks.losses(logits, targets[start:stop]))
                del logits
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        none = (
            rows.new_zeros(0, dtype=wide),
            rows.new_zeros(0, dtype=wide),
            rows.new_zeros(0, 3, dtype=wide),
        )
        losses, maxima, coefficients = (
            torch.cat(parts) for parts in zip(*found or [none], strict=True)
        )
        ctx.save_for_backward(rows, weight, bias, targets, maxima, coefficients)
        ctx.chunks, ctx.main_grad = chunks, main_grad
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, bias, targets, maxima, coefficients = ctx.saved_tensors
        coefficients = coefficients * grads[0][:, None]
        gradients = ctx.chunks.gradients(rows, weight, ctx.needs_input_grad[:3])
        with torch.autocast(rows.device.type, enabled=False):
            for start, stop in ctx.chunks.spans(len(rows)):
                logits = functional.linear(rows[start:stop], weight, bias)
                ctx.chunks.gradient_(
                    logits, targets[start:stop], maxima[start:stop], coefficients[start:stop]
                )
                gradients.add(start, stop, logits)
                del logits
            gradients.finish()
        found = in_parameter_dtype(
            gradients.hidden,
            gradients.weight,
            gradients.bias,
            dtype=weight.dtype,
            main_grad=ctx.main_grad,
        )
        return *found, None, None, None
