"""learn: some steps of an optimizer, which all methods share.

batch -> loss of the method -> backward -> partial gradients of ranks summed -> clipped -> AdamW
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pyops.compress.steps import Step
from pyops.compress.text import Batch, Texts
from pyops.config import ConfigError, OptimizerConfig
from pyops.optim import AdamW
from pyops.tensor_parallel import Ranks, clip_grad_norm_, sync_partial_grads

__all__ = ["adamw", "learn"]

MAX_NORM = 1.0
EVERY = 20  # steps between two lines of a run


def adamw(parameters: Iterable[nn.Parameter], step: Step) -> AdamW:
    """The optimizer of a step; weight decay is of weights of two or more dimensions.

    Args:
        parameters: What learns.
        step: Whose options.
    """
    learning = list(parameters)
    matrices = [parameter for parameter in learning if parameter.dim() > 1]
    vectors = [parameter for parameter in learning if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": each, "weight_decay": decay}
        for each, decay in ((matrices, step.weight_decay), (vectors, 0.0))
        if each
    ]
    return AdamW(groups, lr=step.lr)


def learn(
    model: Any,
    texts: Texts,
    step: Step,
    *,
    loss_of: Callable[[Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    after: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Take the steps. A collective of the ranks that share the model.

    Args:
        model: GPT, which is left in eval mode.
        texts: Which rows.
        step: How many steps, and of which rate.
        loss_of: The loss of a batch, the same on every rank.
        optimizer: Of what learns.
        ranks: That share the layers.
        after: Called with 0, 1, ... after each step.

    Returns:
        {"first_loss": ..., "last_loss": ...} of batches that were learnt.

    Raises:
        ConfigError: On every rank, for a loss that is not finite; the model has been changed then.
    """
    options = OptimizerConfig(
        lr=step.lr, warmup_steps=step.warmup_steps, final_lr_ratio=step.final_lr_ratio
    )
    model.train()
    losses: list[float] = []
    for number, batch in zip(range(step.num_steps), texts.to_learn(step), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = options.lr_at(number, num_steps=step.num_steps)
        shape = (batch[0].shape[0], batch[0].shape[1])
        model.set_dropout(shape, seed=step.seed, step=number)
        loss = loss_of(batch)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise ConfigError(
                f"{step.label}: the loss is {losses[-1]} in step {number} of {step.num_steps}; "
                f"lower lr, which is {step.lr:g}"
            )
        loss.backward()
        sync_partial_grads(model, group=ranks)
        clip_grad_norm_(model, MAX_NORM, group=ranks)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(number)
    model.eval()
    return {"first_loss": losses[0], "last_loss": losses[-1]}
