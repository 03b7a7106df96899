"""The divergence of a student's next words from a teacher's, both after their last linear layers:
neither side's logits exist for more than a chunk of tokens.

    student hidden [N, H]   chunk 0 --> z [n, C] --.   5 numbers a token    losses
                            chunk 1                 >-- gathered over  -->  d z --> d hidden,
    teacher hidden [N, G]   chunk 0 --> y [n, C] --'   the ranks                    d weight
                            chunk 1

The gradients are computed in the forward pass, as if the loss's own gradient were 1, and backward
multiplies them by what it is, as linear_cross_entropy.py does: 6 N H V + 2 N G V operations. The
logits of 16-bit layers are computed in fp32: the difference of two softmaxes that nearly agree is
what 16 bits would lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.ops.layers.cross_entropy import (
    check_options,
    check_targets,
    cross_entropy_gradient,
    cross_entropy_statistics,
    row_losses,
)
from pyops.tensor_parallel.functional.losses.cross_entropy import refuse_together
from pyops.tensor_parallel.functional.losses.divergence import (
    NUMBERS,
    ChunkDivergence,
    DivergenceForm,
)
from pyops.tensor_parallel.functional.losses.head_gradients import (
    HeadGradients,
    check_head,
    in_parameter_dtype,
    scale_,
)
from pyops.tensor_parallel.functional.losses.linear_logits import LinearLogits
from pyops.tensor_parallel.functional.losses.vocabulary_part import VocabularyPart, merge_statistics
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["DivergenceConfig", "DivergenceSums", "linear_kl_divergence"]

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}  # of one side's logits of a chunk


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig:
    """Options of `linear_kl_divergence`, the same on every rank."""

    kind: str = "forward"
    """ "forward", KL(teacher, student), which covers all that the teacher says; "reverse",
    KL(student, teacher), which stays where the teacher is sure; "jsd", between the two; "squared",
    half the square of the difference of logits."""
    temperature: float = 1.0
    """T, by which both sides' logits are divided; the loss is multiplied by T^2."""
    b: float = 0.5
    """Of "jsd": the teacher's share of the mixture that both are compared with, 0 to 1."""
    hard: float = 0.0
    """Share of the cross entropy of the targets at temperature 1; the divergence has 1 - hard."""
    ignore_index: int = -100
    """A target that does not count, neither in the divergence."""
    vocab_size: int | None = None
    """Number of words of the whole vocabulary; None: the ranks' columns together. Columns beyond
    it are padding on both sides, whatever they hold."""
    chunk_tokens: int | None = None
    """Number of tokens whose logits exist at a time; None: as many as fill 16 MiB on the CPU,
    512 MiB on CUDA, on each side. The loss does not depend on it but for the order of its sum."""
    reduce_hidden: bool = True
    """See `LinearCrossEntropyConfig`."""

    @property
    def form(self) -> DivergenceForm:
        """Which divergence it is."""
        return DivergenceForm(self.kind, self.temperature, self.b)


@dataclass(frozen=True)
class DivergenceSums:
    """Sums over the tokens that count, in nats, fp32 (fp64 of fp64)."""

    total: Tensor
    """(1 - hard) soft + hard cross entropy; its gradient is the student's."""
    soft: Tensor
    """The divergence's sum, times T^2; no gradient. 0 where hard is 1."""
    hard: Tensor
    """The cross entropy's sum; no gradient. 0 where hard is 0."""
    count: Tensor
    """How many tokens count."""

    @classmethod
    def of(
        cls,
        student: LinearLogits,
        teacher: LinearLogits,
        targets: Tensor | None = None,
        *,
        group: RanksLike = None,
        config: DivergenceConfig | None = None,
    ) -> DivergenceSums:
        """The sums that `linear_kl_divergence` divides; see there.

        Raises:
            ValueError, TypeError, DisagreementError: as `linear_kl_divergence`.
        """
        options, ranks = config or DivergenceConfig(), Ranks.of(group)
        words = targets
        if words is None:  # every token counts
            words = torch.zeros(
                student.hidden.shape[:-1], dtype=torch.int64, device=student.hidden.device
            )

        def check() -> VocabularyPart:
            return _checked(student, teacher, words, options, ranks, told=targets is not None)

        part = refuse_together(check, ranks, tensor=student.hidden, what="linear_kl_divergence")
        own, other = student.cast(), teacher.cast()
        chunks = _Chunks(part, options, _chunk_size(own.hidden, part, options.chunk_tokens))
        flat = words.reshape(-1)
        total, soft, hard = _SumOfAll.apply(  # type: ignore[no-untyped-call]
            own.hidden.reshape(own.tokens, -1),
            own.weight,
            own.bias,
            LinearLogits(other.hidden.reshape(own.tokens, -1), other.weight, other.bias),
            flat,
            chunks,
            getattr(student.weight, "main_grad", None),
        )
        return cls(total, soft, hard, (flat != options.ignore_index).sum())


def linear_kl_divergence(
    student: LinearLogits,
    teacher: LinearLogits,
    targets: Tensor | None = None,
    *,
    group: RanksLike = None,
    reduction: str = "mean",
    config: DivergenceConfig | None = None,
) -> Tensor:
    """How far the student's next words are from the teacher's, without whole logits of either.

    Each rank has its words of both. 20 bytes a token are exchanged (40 of fp64; 28 and 56 more with
    `hard`, 8 and 16 more for "jsd"), and the gradient of hidden. Peak memory beside the gradients:
    three or four chunks' logits. The gradients of weight and bias are added up in fp32; where the
    weight has an fp32 `main_grad`, its gradient is added to that, and weight.grad stays None.

    Args:
        student: the student's hidden states [..., H] and its last layer, see `LinearLogits`.
        teacher: the teacher's hidden states [..., G] and last layer: other widths, the same words
            on each rank. It takes no gradient.
        targets: [...] int64, words of the whole vocabulary, the same on every rank; needed for
            `hard`, and to say which tokens count. None: all.
        group: see `RanksLike`.
        reduction: "mean" over the tokens that count, or "sum": divide it by the number of tokens of
            all ranks of data parallelism.
        config: see `DivergenceConfig`; None: its defaults.

    Returns:
        The loss in nats, fp32 (fp64 for fp64 hidden), with the same bits on every rank.

    Raises:
        ValueError: shapes, devices or dtypes that do not fit, vocabularies that differ, an option
            out of range, `hard` without targets, a teacher that requires gradients.
        TypeError: dtypes that are none of floating point.
        DisagreementError: on the other ranks then; on every rank where their parts do not make up
            the vocabulary, or their targets or options differ. The latter are not compared on CUDA,
            where nothing waits for the device.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; choose one of mean, sum")
    sums = DivergenceSums.of(student, teacher, targets, group=group, config=config)
    if reduction == "sum":
        return sums.total
    return torch.where(sums.count > 0, sums.total / sums.count.clamp(min=1), torch.nan)


def _checked(
    student: LinearLogits,
    teacher: LinearLogits,
    words: Tensor,
    options: DivergenceConfig,
    ranks: Ranks,
    *,
    told: bool,
) -> VocabularyPart:
    """This rank's part of the vocabulary, of arguments that fit."""
    options.form.check()
    if not 0 <= options.hard <= 1:
        raise ValueError(f"hard is {options.hard}; it is the share of the cross entropy, 0 to 1")
    if options.hard and not told:
        raise ValueError(f"hard is {options.hard} and targets is None; give the words that follow")
    check_options(
        student.hidden, words, label_smoothing=0.0, z_loss=0.0, reduction="sum", what="hidden"
    )
    for side in (student, teacher):
        check_head(side.hidden, side.weight, side.bias)
    if teacher.hidden.shape[:-1] != student.hidden.shape[:-1]:
        raise ValueError(
            f"the student has hidden states {list(student.hidden.shape)}, the teacher "
            f"{list(teacher.hidden.shape)}; they must be of the same tokens"
        )
    if len(teacher.weight) != len(student.weight):
        raise ValueError(
            f"the student has {len(student.weight)} words on this rank, the teacher "
            f"{len(teacher.weight)}; a student learns from a teacher of its vocabulary (pad the "
            "smaller weight with rows of zeros, and give vocab_size)"
        )
    given = (teacher.hidden, teacher.weight, teacher.bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        raise ValueError(
            "the teacher requires gradients; call it under torch.no_grad() and its parameters' "
            "requires_grad_(False)"
        )
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens is {options.chunk_tokens}; give 1 or more, or None for the default"
        )
    part = VocabularyPart.of(
        len(student.weight), ranks, vocab_size=options.vocab_size, first_column=None
    )
    check_targets(words, ignore_index=options.ignore_index, vocab_size=part.vocab_size)
    return part


def _chunk_size(hidden: Tensor, part: VocabularyPart, chunk_tokens: int | None) -> int:
    """Tokens of a chunk, the same on every rank."""
    tokens = max(1, hidden.shape[:-1].numel())
    if chunk_tokens is not None:
        return min(chunk_tokens, tokens)
    wide = 8 if hidden.dtype == torch.float64 else 4
    row_bytes = -(-part.vocab_size // part.ranks.size) * wide
    most = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]) // row_bytes)
    return -(-tokens // -(-tokens // most))


@dataclass(frozen=True)
class _Chunks:
    """The chunks of tokens, and what is computed of the logits of one."""

    part: VocabularyPart
    options: DivergenceConfig
    size: int

    def spans(self, tokens: int) -> list[tuple[int, int]]:
        """(start, stop) of each chunk."""
        return [(start, min(start + self.size, tokens)) for start in range(0, tokens, self.size)]

    def step(
        self, z: Tensor, y: Tensor, words: Tensor, *, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sums of the divergence and of the cross entropy, and the gradient [n, c] over the
        student's logits z of this rank's words; z and y are overwritten."""
        options, part = self.options, self.part
        hard, form = options.hard, options.form
        raw = z.clone() if 0 < hard < 1 else z
        divergence = None
        if hard < 1:
            factor = 1 / form.temperature
            scaled = (z, y) if factor == 1 else (z.mul_(factor), y.mul_(factor))
            divergence = ChunkDivergence(*scaled, form)
        parts = self._exchanged(raw, divergence, words)
        counts = (words != options.ignore_index).to(z.dtype)
        soft, cross, gradient = z.new_zeros(()), z.new_zeros(()), None
        if divergence is not None:
            soft = (divergence.losses(parts[:, :, -NUMBERS:], part.ranks) * counts).sum()
            if with_gradient:
                gradient = divergence.gradient(counts * (1 - hard))
        if hard:
            statistics = merge_statistics(parts[:, :, :3])
            losses, coefficients = self._cross_entropy(statistics, words)
            cross = losses.sum()
            if with_gradient:
                own = cross_entropy_gradient(
                    raw,
                    words,
                    statistics[:, 0].contiguous(),
                    coefficients * hard,
                    ignore_index=options.ignore_index,
                    first_column=part.first_column,
                    columns=part.columns,
                    out=raw,
                )
                gradient = own if gradient is None else gradient.add_(own)
        return soft, cross, gradient

    def _cross_entropy(self, statistics: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return row_losses(
            statistics,
            words,
            ignore_index=self.options.ignore_index,
            label_smoothing=0.0,
            z_loss=0.0,
            vocab_size=self.part.vocab_size,
        )

    def _exchanged(self, raw: Tensor, divergence: ChunkDivergence | None, words: Tensor) -> Tensor:
        """[ranks, n, 3 of the cross entropy, NUMBERS of the divergence], of what is asked for."""
        found = []
        if self.options.hard:
            found.append(
                cross_entropy_statistics(
                    raw,
                    words,
                    ignore_index=self.options.ignore_index,
                    first_column=self.part.first_column,
                    columns=self.part.columns,
                )
            )
        if divergence is not None:
            found.append(divergence.numbers())
        own = torch.cat(found, dim=1)
        if self.part.ranks.size == 1:
            return own[None]
        asked = (self.options.form, self.options.hard, self.options.ignore_index)
        note = own.new_zeros(1, own.shape[1])
        return self.part.gather(torch.cat([own, note]), words, asked)[:, :-1]


class _SumOfAll(torch.autograd.Function):
    """(total, soft, hard) of the student's hidden [N, H]; gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: LinearLogits,
        words: Tensor,
        chunks: _Chunks,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        needs = ctx.needs_input_grad[:3]
        ranks, columns = chunks.part.ranks, chunks.part.columns
        soft, hard = rows.new_zeros((), dtype=wide), rows.new_zeros((), dtype=wide)
        gradients = HeadGradients(
            rows,
            weight,
            needs,
            ranks=ranks,
            reduce_hidden=chunks.options.reduce_hidden and ranks.size > 1,
        )
        student = LinearLogits(rows, weight, bias)
        with torch.autocast(rows.device.type, enabled=False):
            for start, stop in chunks.spans(len(rows)):
                z, y = (side.of_tokens(start, stop, columns) for side in (student, teacher))
                of_chunk = chunks.step(z, y, words[start:stop], with_gradient=any(needs))
                del z, y
                soft, hard = soft + of_chunk[0], hard + of_chunk[1]
                if of_chunk[2] is not None:
                    gradients.add(start, stop, _padded_to(of_chunk[2], weight, rows.dtype))
            gradients.finish()
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtype, ctx.main_grad = weight.dtype, main_grad
        ctx.mark_non_differentiable(soft, hard)
        share = chunks.options.hard
        return (1 - share) * soft + share * hard, soft, hard

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias = (
            None if x is None else scale_(x, grads[0]) for x in ctx.saved_tensors
        )
        return (
            *in_parameter_dtype(hidden, weight, bias, dtype=ctx.dtype, main_grad=ctx.main_grad),
            None,
            None,
            None,
            None,
        )


def _padded_to(gradient: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, C] in the layer's dtype, zero in the columns that are padding."""
    missing = len(weight) - gradient.shape[1]
    if missing:
        gradient = torch.nn.functional.pad(gradient, (0, missing))
    return gradient.to(dtype)
