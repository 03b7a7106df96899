"""The divergence of whole logits: of classifiers, and of models that change their logits after the
last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.mesh import ALONE
from pyops.tensor_parallel import DivergenceConfig, Ranks
from pyops.tensor_parallel.functional.losses.divergence import ChunkDivergence, DivergenceForm

__all__ = ["logits_divergence"]


def logits_divergence(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor | None = None,
    *,
    reduction: str = "mean",
    config: DivergenceConfig | None = None,
) -> Tensor:
    """How far the student's logits are from the teacher's.

    Args:
        student: [..., V], floating point; it takes the gradient.
        teacher: [..., V], which takes none.
        targets: [...] int64 classes, needed for config.hard and to say which rows count; None: all
            do.
        reduction: "mean" over the rows that count, or "sum".
        config: see `DivergenceConfig`, of which vocab_size, chunk_tokens and reduce_hidden mean
            nothing here.

    Returns:
        The loss in nats, fp32 (fp64 of fp64).

    Raises:
        ValueError: shapes that differ, an option out of range, `hard` without targets, a teacher
            that requires gradients.
    """
    options = config or DivergenceConfig()
    options.form.check()
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; choose one of mean, sum")
    if student.shape != teacher.shape or student.device != teacher.device:
        raise ValueError(
            f"the student has logits {list(student.shape)} on {student.device}, the teacher "
            f"{list(teacher.shape)} on {teacher.device}; both need the same classes and rows"
        )
    if teacher.requires_grad:
        raise ValueError("the teacher's logits require gradients; call it under torch.no_grad()")
    if not 0 <= options.hard <= 1:
        raise ValueError(f"hard is {options.hard}; it is the share of the cross entropy, 0 to 1")
    if targets is None and options.hard:
        raise ValueError(f"hard is {options.hard} and targets is None; give the classes")
    if targets is not None and targets.shape != student.shape[:-1]:
        raise ValueError(
            f"targets are {list(targets.shape)}; give one for each of {list(student.shape[:-1])} "
            "rows of logits"
        )
    rows = student.reshape(-1, student.shape[-1])
    words = rows.new_zeros(len(rows), dtype=torch.int64) if targets is None else targets.reshape(-1)
    counts = words != options.ignore_index
    losses = _Divergence.apply(  # type: ignore[no-untyped-call]
        rows, teacher.reshape(rows.shape).to(rows.dtype), options.form
    )
    total = (1 - options.hard) * (losses * counts).sum()
    if options.hard:
        wide = rows if rows.dtype == torch.float64 else rows.float()
        total = total + options.hard * functional.cross_entropy(
            wide, words, ignore_index=options.ignore_index, reduction="sum"
        )
    result: Tensor = total if reduction == "sum" else total / counts.sum()
    return result


class _Divergence(torch.autograd.Function):
    """losses [N] of logits [N, V]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, teacher: Tensor, form: DivergenceForm) -> Tensor:
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        factor = 1 / form.temperature
        z, y = (x.to(wide) * factor for x in (rows, teacher))
        divergence = ChunkDivergence(z, y, form)
        losses = divergence.losses(divergence.numbers()[None], Ranks.of(ALONE))
        ctx.save_for_backward(divergence.gradient(torch.ones_like(losses)))
        ctx.dtype = rows.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0][:, None]).to(ctx.dtype), None, None
