"""The half-steps of an optimizer whose variance no longer changes, over all parameters of its
groups.

take_gradients    m = m + (1 - beta) (g - m)                    g: this rank's own gradient
step_frozen       p = p (1 - lr wd) - lr m / (sqrt(v) + eps)    m: what came back from the ranks
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.onebit.steps.state_slots import StateSlots
from pyops.ops.optimizers.frozen_adam import frozen_adam_, momentum_
from pyops.optim.fused.input_checks import number
from pyops.optim.fused.memory_layout import is_dense, lies_like
from pyops.optim.fused.table_rows import Row, split_rows, table_rows_of
from pyops.optim.one_bit import inverse_root, mean_weight
from pyops.protocols import ParamGroup

__all__ = ["corrected_beta", "inverse_roots", "step_frozen", "take_gradients"]


def corrected_beta(beta: float, step: int) -> float:
    """The decay with which the bias-corrected mean of `step - 1` gradients becomes that of
    `step` gradients; it tends to beta."""
    return 1.0 - mean_weight(beta, step) if step > 0 else beta


def inverse_roots(slots: StateSlots, variances: Sequence[Tensor], eps: Sequence[float]) -> Tensor:
    """Flat: 1 / (sqrt(v) + eps) where v is not 0, else 0. One variance and one eps per slot."""
    flat = slots.gather(variances)
    for slot, each in zip(slots, eps, strict=True):
        own = flat[slot.start : slot.stop]
        own.copy_(inverse_root(own, each))
    return flat  # padding is 0


def take_gradients(
    slots: StateSlots,
    flat: Tensor,
    gradients: Sequence[Tensor | None],
    betas: Sequence[float],
    *,
    factor: float,
    roots: Tensor | None = None,
) -> None:
    """Take this rank's gradients, times factor, into the running means in `flat`. One gradient and
    beta per slot; None: zeros.

    Args:
        roots: Flat; gradients are multiplied by it first.
    """
    calls: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for slot, gradient, beta in zip(slots, gradients, betas, strict=True):
        mean = slot.view(flat)
        if gradient is None:
            mean.mul_(beta)
            continue
        if roots is not None:
            gradient = gradient * slot.view(roots)
        if not (is_dense(gradient) and lies_like(gradient, mean.stride())):
            gradient = torch.empty_like(mean, dtype=gradient.dtype).copy_(gradient)
        means, found = calls[beta]
        means.append(mean)
        found.append(gradient)
    scale = None if factor == 1.0 else torch.tensor(factor, dtype=torch.float32, device=flat.device)
    for beta, (means, found) in calls.items():
        momentum_(means, found, scale, None, beta=beta)


def step_frozen(
    group: ParamGroup,
    rows: Iterable[tuple[Tensor, Tensor, Tensor, dict[str, Any]]],
    *,
    eps: float,
    lr: float | Tensor,
    weight_decay: float,
    count: bool = True,
) -> None:
    """Move parameters of a group.

    Args:
        rows: (parameter, mean, variance, state), with "step", and perhaps "master", in state.
        count: Whether the step is counted.
    """
    copies = dict(zip(map(id, group["params"]), group.get("copies") or (), strict=False))
    columns: list[list[Tensor | None]] = [
        [p, None, mean, variance, None, state.get("master"), copies.get(id(p)), state["step"]]
        for p, mean, variance, state in rows
    ]
    if not columns:
        return
    device = columns[0][0].device  # type: ignore[union-attr]
    known = number(lr)
    rate = (
        lr.reshape(()).to(device, torch.float32)
        if isinstance(lr, Tensor) and known is None
        else None
    )
    fast, others = split_rows([Row(i, column, 0) for i, column in enumerate(columns)])
    for some in ([fast] if fast else []) + others:
        batch = table_rows_of(some, zero_grads=False)
        batch.load(gradients=False)
        params, _, means, variances, _, masters, into, _ = batch.columns
        frozen_adam_(
            params,
            means,
            variances,
            masters,
            into,
            rate,
            None,
            lr=known or 0.0,
            eps=eps,
            weight_decay=weight_decay,
        )
        batch.store()
        torch.autograd.graph.increment_version(params + into)
    if count:
        torch._foreach_add_([step for column in columns if (step := column[-1]) is not None], 1.0)
