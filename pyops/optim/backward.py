"""Stepping inside the backward pass: each parameter as its gradient arrives, which is then freed.

    backward:  ... grad of layer 3 -> step layer 3, free -> grad of layer 2 -> step layer 2, free

At no time are there more gradients than one layer's: 4 bytes per parameter less, and the gradient
is still in cache when the step reads it. Lv et al., LOMO, arXiv:2306.09782, section 3.1 (fused
update); here with the optimizer's full state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyops.optim.fused.fused_optimizer import FusedOptimizer

__all__ = ["FusedBackward", "fuse_into_backward"]


class FusedBackward:
    """What fuse_into_backward returns; also a context manager. `remove()`: gradients stay again,
    step() steps."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> FusedBackward:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def fuse_into_backward(model: nn.Module, optimizer: FusedOptimizer) -> FusedBackward:
    """From now on, backward() steps each parameter of `optimizer` as soon as its gradient is there,
    and frees it.

    optimizer.step() and zero_grad() find no gradients then and may be called or not; learning-rate
    schedulers work as ever. Every backward() is a step: gradients can't be accumulated over
    several. To accumulate, remove() first, or add the losses and call backward() once. Loss scaling
    is not undone (no GradScaler), and step hooks are not called.

    Args:
        model: The module that has all parameters of the optimizer.
        optimizer: Of pyops.optim, without max_grad_norm.

    Returns:
        The hooks; its `remove()` ends this.

    Raises:
        TypeError: When the optimizer is not of pyops.optim.
        ValueError: When it has max_grad_norm (the norm is known only after the whole backward
            pass) or owns parameters that are not the model's.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"fuse_into_backward needs an optimizer of pyops.optim, got {type(optimizer).__name__}"
        )
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={optimizer.max_grad_norm} needs all gradients before the "
            "first step, and fuse_into_backward "
            "steps as they arrive; build the optimizer without it, or call "
            "optimizer.step() after backward()"
        )
    of_model = set(model.parameters())
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := [p for p in owned if p not in of_model]:
        raise ValueError(
            f"{len(unknown)} of the optimizer's {len(owned)} parameters are not the "
            "model's (the first has shape "
            f"{tuple(unknown[0].shape)}) and would never be stepped; pass the model "
            "that holds them all"
        )

    # Positions, not groups: load_state_dict replaces the groups' dictionaries.
    places = {
        p: (g, i)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }

    def step(parameter: Tensor) -> None:
        optimizer.step_parameter(*places[parameter])
        parameter.grad = None

    return FusedBackward(
        [p.register_post_accumulate_grad_hook(step) for p in places if p.requires_grad]
    )
