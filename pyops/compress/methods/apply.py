"""apply_step: which step is whose, and whether it did anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pyops.comm.agreement import gather
from pyops.compress.methods.learned import distill, finetune
from pyops.compress.methods.pruned import prune
from pyops.compress.methods.quantized import quantize
from pyops.compress.methods.work import Facts, Work
from pyops.compress.steps import (
    DistillStep,
    FinetuneStep,
    PruneStep,
    QuantizeStep,
    Step,
)
from pyops.config import ConfigError

__all__ = ["METHODS", "apply_step"]

METHODS: dict[type[Step], Callable[[Work, Any], Facts]] = {
    DistillStep: distill,
    FinetuneStep: finetune,
    PruneStep: prune,
    QuantizeStep: quantize,
}


def apply_step(work: Work, step: Step) -> None:
    """Change the model as a step says. A collective of the ranks that share it.

    Args:
        work: Whose model is changed, or replaced.
        step: What to do.

    Raises:
        ConfigError: On every rank, for a step that left every weight as it was, and for what can't
            be done with this model.
    """
    before = _digest(work.model)
    try:
        work.facts = METHODS[type(step)](work, step)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{step.label}: {error}") from None
    work.model.eval()
    work.check_masks()
    changed = gather(_digest(work.model) != before, group=work.ranks.group)
    if not any(changed):
        raise ConfigError(
            f"{step.label} has left every weight as it was; give it more to do, or leave it out"
        )


def _digest(model: nn.Module) -> str:
    """Of the names and the bits of all tensors of this rank."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().reshape(-1)
        found.update(memoryview(flat.view(torch.uint8).cpu().numpy()))
    return found.hexdigest()
