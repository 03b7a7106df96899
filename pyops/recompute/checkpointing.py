"""checkpoint: one call of a function whose intermediate results are thrown away, and computed again
in backward.

    checkpoint(f, x, mask=m)   tensors anywhere in args and kwargs  -> inputs of torch's
                                                                    non-reentrant checkpoint
                               parameters and everything else       -> stay with f

torch's checkpoint saves its inputs before it puts its own hooks in place, so hooks around the call
see the inputs and nothing else: that is where they are split, moved or put into the arena.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyops import random
from pyops.recompute.arena import Arena
from pyops.recompute.inputs import keeping_of
from pyops.recompute.prefetch import Prefetch

__all__ = ["checkpoint"]

T = TypeVar("T")


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    partition_group: dist.ProcessGroup | None = None,
    offload: str | None = None,
    arena: Arena | None = None,
    prefetch: Prefetch | None = None,
    **kwargs: Any,
) -> T:
    """`function(*args, **kwargs)`, keeping for backward its inputs instead of what it computed on
    the way.

    Backward runs the function again, once per call, under the random states (torch's, CPU and CUDA)
    and the autocast of the first time, up to the last tensor it needs; gradients have the same bits
    as without checkpoint. Calls nest. Under torch.no_grad nothing is kept; without a backward, what
    was kept goes with the result.

    With one of these three, inputs are copied, and may be changed in place afterwards; without,
    that is autograd's usual RuntimeError in backward. Parameters among the arguments are never
    copied.

    The function must compute the same thing twice: what it reads beside its arguments must not have
    changed by then. Only the states of counter-based dropout (pyops.tensor_parallel.set_dropout),
    in a function that is a module or a method of one, are those of the first time. Modules with
    running statistics (batch norm) count a batch twice. Python's and NumPy's random states are not
    kept.

    Raises, before the function is called, ValueError for an unknown `offload` or a
    `partition_group` that this rank is not in, TypeError for an `arena` or a `prefetch` that is
    none;
    in backward torch.utils.checkpoint.CheckpointError when the second run saves other tensors than
    the first.

    Args:
        partition_group: Each rank of this process group keeps 1/n of every input, in
            torch.tensor_split's parts, and all-gathers them in backward. Inputs must be equal on
            its ranks (as within a tensor-parallel group), which is not checked; ranks whose shapes
            differ all get pyops.comm's DisagreementError in backward.
        offload: "cpu" keeps CUDA inputs in pinned host memory; inputs in host memory stay where
            they are.
        arena: A pyops.recompute.Arena in which the copies lie one after the other; RuntimeError
            when they don't fit.
        prefetch: A pyops.recompute.Prefetch, the same for the parts of one model: while backward is
            in one part, the inputs of the part before it are gathered, or copied to the GPU. One
            part's inputs more are whole at a time.
    """
    plain = partition_group is None and offload is None and arena is None
    if plain and torch.compiler.is_compiling():  # which supports torch's checkpoint
        found: T = torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
        return found
    leaves, structure = tree_flatten((args, kwargs))
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    ]
    tensors = [leaves[i] for i in places]
    keeping = None if plain else keeping_of(partition_group, offload, arena, tensors)
    _check(prefetch)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    for i in places:
        leaves[i] = None  # the function below lives as long as the graph and must not hold them
    states = _states_of(function)

    def run(*inputs: Tensor) -> T:
        filled = list(leaves)
        for i, tensor in zip(places, inputs, strict=True):
            filled[i] = tensor
        given, named = tree_unflatten(filled, structure)
        with random.with_states(states):
            return function(*given, **named)

    inputs = keeping if prefetch is None or keeping is None else prefetch.inputs(keeping)
    hooks = (
        contextlib.nullcontext()
        if inputs is None
        else saved_tensors_hooks(inputs.pack, inputs.unpack)
    )
    with hooks:
        result: T = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)
    return result


def _check(prefetch: Any) -> None:
    if prefetch is not None and not isinstance(prefetch, Prefetch):
        raise TypeError(
            f"prefetch is {prefetch!r}; expected a pyops.recompute.Prefetch, one for the "
            "parts of a model, or None"
        )


def _states_of(function: Callable[..., Any]) -> list[tuple[nn.Module, Any]]:
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return random.states_of(owner) if isinstance(owner, nn.Module) else []
