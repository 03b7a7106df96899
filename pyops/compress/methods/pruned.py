"""The step that prunes: masks by magnitude or of n:m, at once or while the model learns on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyops.compress.learning import adamw
from pyops.compress.methods.work import Facts, Work
from pyops.compress.steps import PruneStep
from pyops.compress.text import Batch
from pyops.pruning import (
    NM,
    CubicSchedule,
    Masks,
    gradual,
    magnitude,
    nm_masks,
    permute,
    sparse_training,
)

__all__ = ["prune"]

MASKS = 20  # of a gradual step, at most


def prune(work: Work, step: PruneStep) -> Facts:
    """The smallest weights of the model go, and masks say which.

    Args:
        work: Whose masks are new afterwards.
        step: The options.
    """
    model = work.model.requires_grad_(True)
    facts: Facts = {}
    work.release_masks()
    if step.permute:
        gains = permute(model, seed=step.seed).gains.values()
        facts["kept_magnitude"] = {
            name: sum(getattr(gain, name) for gain in gains) / len(gains)
            for name in ("before", "after")
        }
    work.masks = _masks(work, step, facts)
    work.sparsity = step.sparsity
    return facts


def _masks(work: Work, step: PruneStep, facts: Facts) -> Masks:
    model, only = work.model, step.only or None
    n, _, m = step.pattern.partition(":")
    pattern = NM(int(n), int(m)) if step.pattern else None

    def loss(batch: Batch) -> Tensor:
        found: Tensor = model.loss(*batch)
        return found

    if step.how == "once" or not step.num_steps:
        masks = _at_once(work, step, pattern, only)
        if step.num_steps:
            work.masks = masks
            facts |= work.learn(step, loss)
        return masks
    optimizer = adamw(model.parameters(), step)
    if pattern is not None:
        with sparse_training(model, pattern=pattern, optimizer=optimizer, only=only) as training:
            facts |= work.learn(step, loss, optimizer=optimizer)
            return training.finish()
    every = max(1, 2 * step.num_steps // 3 // MASKS)
    times = max(1, 2 * step.num_steps // 3 // every)
    schedule = CubicSchedule(
        final=step.sparsity, begin=0, every=every, times=times, initial=work.sparsity
    )
    with gradual(
        model,
        optimizer,
        schedule,
        scope=step.scope,
        only=only,
        least=step.least,
        group=work.ranks.group,
    ) as pruner:
        facts |= work.learn(step, loss, optimizer=optimizer, after=lambda _: pruner.step())
        assert pruner.masks is not None
        found = dict(pruner.masks)
    return Masks(model, found)


def _at_once(work: Work, step: PruneStep, pattern: NM | None, only: Sequence[str] | None) -> Masks:
    if pattern is not None:
        return nm_masks(work.model, pattern, only=only)
    return magnitude(
        work.model,
        step.sparsity,
        scope=step.scope,
        only=only,
        least=step.least,
        group=work.ranks.group,
    )
