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

from pyops.comm.collectives.work import Work
from pyops.deferred import accumulate_weight_gradient
from pyops.ops.layers.cross_entropy import (
    check_options,
    check_targets,
    cross_entropy_gradient,
    reduce_losses,
    row_losses,
)
from pyops.tensor_parallel.functional.losses.cross_entropy import refuse_together
from pyops.tensor_parallel.functional.keywords import refuse_keywords
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.functional.losses.vocabulary_part import (
    CrossEntropyConfig,
    RowOptions,
    VocabularyPart,
)

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
        _check_weight(hidden, weight, bias)
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
    x, w, b = _cast(hidden, weight, bias)
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


def _check_weight(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if (
        weight.dim() != 2
        or weight.shape[1] != hidden.shape[-1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            "hidden [..., H] needs weight [C, H] and bias [C] or None; got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and "
            f"{None if bias is None else tuple(bias.shape)}"
        )
    others = [weight] if bias is None else [weight, bias]
    cast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    if any(t.device != hidden.device or (t.dtype != hidden.dtype and not cast) for t in others):
        raise ValueError(
            f"hidden is {hidden.dtype} on {hidden.device}; weight and bias must be so too, got "
            f"{', '.join(f'{t.dtype} on {t.device}' for t in others)}"
        )


def _cast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast everything in its dtype, as torch's own linear does."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


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


class _Gradients:
    """The gradients of hidden, weight and bias as they add up over chunks; None for a tensor that
    requires none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self, rows: Tensor, weight: Tensor, needs: tuple[bool, ...], chunks: _Chunks
    ) -> None:
        self.wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self.rows, self.matrix, self.ranks = rows, weight, chunks.part.ranks
        self.hidden = (
            torch.empty_like(rows, memory_format=torch.contiguous_format) if needs[0] else None
        )
        self.weight, self.needs_weight = None, needs[1]
        self.bias = weight.new_zeros(len(weight), dtype=self.wide) if needs[2] else None
        self.reduce_hidden = chunks.reduce_hidden
        self.pending: tuple[Work, Tensor] | None = None

    def add(self, start: int, stop: int, dz: Tensor) -> None:
        """Adds a chunk's share, of the gradient dz [n, C] of its logits; the ranks' sum of hidden's
        is communicated while the weight's product is computed."""
        if self.hidden is not None:
            self._add_hidden(self.hidden[start:stop], dz)
        if self.needs_weight:
            self._add_weight(dz, self.rows[start:stop])
        if self.bias is not None:
            self.bias += dz.sum(0, dtype=self.bias.dtype)

    def _add_hidden(self, out: Tensor, dz: Tensor) -> None:
        if not self.reduce_hidden:
            torch.mm(dz, self.matrix, out=out)
            return
        self.finish()
        sixteen = dz.dtype in (torch.bfloat16, torch.float16)
        if sixteen and dz.is_cuda:
            product = torch.mm(dz, self.matrix, out_dtype=torch.float32)
        else:
            product = dz.float() @ self.matrix.float() if sixteen else dz @ self.matrix
        self.pending = self.ranks.sum_(product, async_op=True), out

    def _add_weight(self, dz: Tensor, rows: Tensor) -> None:
        # The first chunk's product is written, not added to zeros: 12 bytes of each weight less.
        if self.weight is None and dz.dtype == self.wide:
            self.weight = dz.t() @ rows
        elif self.weight is None and dz.is_cuda:
            self.weight = torch.mm(dz.t(), rows, out_dtype=self.wide)
        else:
            self.weight = self._zeros() if self.weight is None else self.weight
            accumulate_weight_gradient(self.weight, dz, rows)

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.matrix, dtype=self.wide, memory_format=torch.contiguous_format)

    def finish(self) -> None:
        """Waits for the sum that is pending. Without tokens, nothing was added to the weight's
        gradient: it is zero."""
        if self.needs_weight and self.weight is None:
            self.weight = self._zeros()
        if self.pending is not None:
            work, out = self.pending
            out.copy_(work.wait())
            self.pending = None


def _in_parameter_dtype(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    main_grad: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients in their parameters' dtype; the weight's None where it was added to
    `main_grad`."""
    if weight is not None and main_grad is not None:
        main_grad.add_(weight)
        weight = None
    return (
        hidden,
        None if weight is None else weight.to(dtype),
        None if bias is None else bias.to(dtype),
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
        gradients = _Gradients(rows, weight, needs, chunks)
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
        hidden, bias = (None if x is None else _scale_(x, grads[0]) for x in (hidden, bias))
        if weight is not None and ctx.main_grad is None and weight.dtype != ctx.dtype:
            # Multiplied and rounded in one pass over the largest tensor there is.
            weight = torch.mul(
                weight, grads[0].reshape(1), out=torch.empty_like(weight, dtype=ctx.dtype)
            )
        elif weight is not None:
            weight = _scale_(weight, grads[0])
        return (
            *_in_parameter_dtype(hidden, weight, bias, dtype=ctx.dtype, main_grad=ctx.main_grad),
            None,
            None,
            None,
        )


def _scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor in fp32 at least: a loss scale may exceed what fp16 holds."""
    return torch.mul(x, factor.reshape(1), out=x) if x.dtype != factor.dtype else x.mul_(factor)


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
        gradients = _Gradients(rows, weight, ctx.needs_input_grad[:3], ctx.chunks)
        with torch.autocast(rows.device.type, enabled=False):
            for start, stop in ctx.chunks.spans(len(rows)):
                logits = functional.linear(rows[start:stop], weight, bias)
                ctx.chunks.gradient_(
                    logits, targets[start:stop], maxima[start:stop], coefficients[start:stop]
                )
                gradients.add(start, stop, logits)
                del logits
            gradients.finish()
        found = _in_parameter_dtype(
            gradients.hidden,
            gradients.weight,
            gradients.bias,
            dtype=weight.dtype,
            main_grad=ctx.main_grad,
        )
        return *found, None, None, None
