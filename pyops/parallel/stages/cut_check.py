"""A cut is tried before the model is changed: a small copy in stages of one block each, run one
after the other, has the outputs and the gradients of the uncut copy, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pyops.parallel.stages.model_layout import ModelLayout
from pyops.parallel.stages.model_stage import ModelStage, cut_into_stages

__all__ = ["backward_in_turn", "check_cut", "run_in_turn"]

Crossing = tuple[Sequence[Tensor], Sequence[Tensor]]  # (values sent, values received)


def run_in_turn(
    stages: Sequence[ModelStage], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Crossing]]:
    """Run stages of one process one after the other.

    Args:
        stages: All stages of a model.
        args: Positional arguments of the model.
        kwargs: Its named arguments.

    Returns:
        What the last stage returns, and what went over each boundary.
    """
    crossings: list[Crossing] = []
    values: Any = ()
    for number, stage in enumerate(stages):
        received = tuple(v.detach().requires_grad_(v.requires_grad) for v in values)
        if number:
            crossings.append((values, received))
        values = stage.run(received, args, dict(kwargs))
    return values, crossings


def backward_in_turn(output: Tensor, crossings: Sequence[Crossing]) -> None:
    """Backward of a sum of the last stage's results through all stages."""
    output.backward()
    for sent, received in reversed(crossings):
        pairs = [(y, x.grad) for y, x in zip(sent, received, strict=True) if x.grad is not None]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def check_cut(
    small: nn.Module, layout: ModelLayout, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compare.

    Args:
        small: A small copy of the model, whose parameters are left with gradients.
        layout: Of the copy.
        args: Positional arguments of its forward.
        kwargs: Its named arguments.

    Raises:
        ValueError: An output or a gradient differs, or the stages can't be run, with the reason.
    """
    # Of its own modules and buffers, which a forward may change, but with the same parameters.
    cut = copy.deepcopy(small, {id(p): p for p in small.parameters()})
    small.requires_grad_(True)
    small.zero_grad()
    measured = _measured(small(*args, **kwargs))
    measured.backward()
    expected = measured.detach()
    gradients = {name: p.grad for name, p in small.named_parameters()}
    small.zero_grad()
    num_blocks = layout.num_blocks
    stages = cut_into_stages(
        cut,
        layout,
        range(num_blocks + 1),
        range(num_blocks),
        shapes=small,  # every stage is here, so there are no placeholders
        device=torch.device("cpu"),
        named_arguments=frozenset(),
    )
    output, crossings = run_in_turn(stages, args, kwargs)
    found = _measured(output)
    if not torch.equal(found, expected):
        raise ValueError(
            f"in {num_blocks} stages its outputs are not those of the uncut model "
            f"({found.item():.6g} instead of {expected.item():.6g} in the check)"
        )
    backward_in_turn(found, crossings)
    for name, p in small.named_parameters():
        one, other = gradients[name], p.grad
        if (one is None) != (other is None) or not (
            one is None or other is None or torch.equal(one, other)
        ):
            raise ValueError(
                f"in {num_blocks} stages the gradient of {name} is not that of the uncut model"
            )


def _measured(output: Any) -> Tensor:
    """A weighted sum of the logits, or of all results of a model that has none."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    leaves = [
        leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not leaves:
        raise ValueError("none of its outputs has a gradient")
    total = torch.zeros(())
    for leaf in leaves:
        weights = torch.arange(1, leaf.numel() + 1, dtype=leaf.dtype).cos().view(leaf.shape)
        total = total + (leaf * weights).sum()
    return total
