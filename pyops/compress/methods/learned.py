"""The steps that are nothing but learning: from the model of the folder in, or from the text."""

from __future__ import annotations

from torch import Tensor

from pyops.adapters import LoRA
from pyops.compress.methods.work import Facts, Work
from pyops.compress.steps import DistillStep, FinetuneStep, LayersStep
from pyops.compress.text import Batch
from pyops.distill import Distillation, DistillationConfig, freeze, student_from_layers

__all__ = ["distill", "finetune"]


def _keep_layers(work: Work, step: LayersStep) -> None:
    if step.keep:
        work.model = student_from_layers(work.model, list(step.keep))


def distill(work: Work, step: DistillStep) -> Facts:
    """The model, or some layers of it, learns from the teacher.

    Args:
        work: With a teacher.
        step: The options.
    """
    assert work.teacher is not None
    _keep_layers(work, step)
    loss_of = Distillation(
        DistillationConfig(
            soft=step.soft, hard=step.hard, hidden=step.hidden, temperature=step.temperature
        )
    )
    model, teacher = work.model.requires_grad_(True), freeze(work.teacher)

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        found: Tensor = loss_of(model, teacher, tokens, targets).loss
        return found

    return work.learn(step, loss)


def finetune(work: Work, step: FinetuneStep) -> Facts:
    """The model, or adapters that are merged into it, learns the text.

    Args:
        work: The model.
        step: The options.
    """
    _keep_layers(work, step)
    model = work.model.requires_grad_(True)
    adapters = None
    if step.rank:
        adapters = LoRA(
            model, rank=step.rank, alpha=step.alpha, only=step.only or None, seed=step.seed
        )
    facts = work.learn(step, lambda batch: model.loss(*batch))
    if adapters is not None:
        adapters.merge()
        adapters.remove()
    return facts
