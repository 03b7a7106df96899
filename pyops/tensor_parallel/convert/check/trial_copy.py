"""trial_copy: a small copy of a model, on which a plan is tried before the model is changed.

Values are drawn anew because those of a fresh model (zero biases, norms of one, small weights) hide
errors. Blocks that are alike are there twice, so what it takes does not grow with the depth.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from pyops.host_memory import free_memory

__all__ = ["trial_copy"]

# of the copy's parameters, in bytes at the peak: the copy, its gradients, the parts, their
# gradients, one in the making
_COPIES = 5


def trial_copy(
    model: nn.Module, dtype: torch.dtype, blocks: list[str], *, alike: int = 2
) -> nn.Module:
    """A copy on the CPU with values drawn anew, in evaluation mode, without gradients.

    Args:
        model: The model; its parameters may be on the meta device.
        dtype: Of the copy.
        blocks: The names of lists of modules.
        alike: Of how many modules of these lists that are alike there are copies.
    """
    dropped = {id(each) for name in blocks for each in _alike(model.get_submodule(name), alike)}
    memo: dict[int, Any] = {key: nn.Identity() for key in dropped}
    outside = _parameters_without(model, dropped)
    _check_memory(sum(p.numel() for p in outside), dtype)
    generator = torch.Generator().manual_seed(1)
    for p in outside:
        memo[id(p)] = (
            nn.Parameter(_drawn(p, dtype, generator)) if p.is_floating_point() else p.detach().cpu()
        )
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(
            "cpu", dtype if buffer.is_floating_point() else buffer.dtype, copy=True
        )
    found = copy.deepcopy(model, memo)
    for name in blocks:
        _without_identities(found.get_submodule(name), model.get_submodule(name), dropped)
    return found.eval()


def _switches(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Attributes that are True, False or a word by their values, others by their types: a number
    may be the block's own."""
    given = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return tuple(
        sorted(
            (name, value if isinstance(value, bool | str) else type(value).__name__)
            for name, value in given
        )
    )


def _alike(blocks: nn.Module, number: int) -> list[nn.Module]:
    """Those of which there are `number` before: of the same classes and switches, with parameters
    of the same names and shapes.

    A block may differ from the others in a switch alone, such as Gemma 3's `is_sliding`.
    """
    times: dict[Any, int] = {}
    found = []
    for block in blocks.children():
        key = (
            tuple(
                (name, type(module), _switches(module)) for name, module in block.named_modules()
            ),
            tuple((name, p.shape) for name, p in block.named_parameters()),
        )
        times[key] = times.get(key, 0) + 1
        if times[key] > number:
            found.append(block)
    return found


def _parameters_without(model: nn.Module, dropped: set[int]) -> list[nn.Parameter]:
    found: dict[int, nn.Parameter] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in dropped:
            found.update((id(p), p) for p in module._parameters.values() if p is not None)
            waiting += list(module.children())[::-1]
    return list(found.values())


def _without_identities(blocks: nn.Module, before: nn.Module, dropped: set[int]) -> None:
    left = [
        new
        for new, old in zip(blocks.children(), before.children(), strict=True)
        if id(old) not in dropped
    ]
    blocks._modules.clear()
    blocks._modules.update({str(i): each for i, each in enumerate(left)})


def _check_memory(elements: int, dtype: torch.dtype) -> None:
    needed = elements * dtype.itemsize * _COPIES
    try:
        free = free_memory()
    except OSError:  # a system without /proc does not say
        return
    if needed > free:
        raise MemoryError(
            f"it takes {needed / 2**30:.1f} GiB of the host's memory, and "
            f"{free / 2**30:.1f} GiB are free"
        )


def _drawn(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Matrices keep the size of what goes through; vectors are near to what they were, and nowhere
    alike."""
    noise = torch.randn(p.shape, generator=generator, dtype=dtype)
    if p.dim() > 1:
        return noise / math.sqrt(max(1, p.numel() // max(1, len(p))))
    base = torch.zeros((), dtype=dtype) if p.is_meta else p.detach().to("cpu", dtype)
    return base + 0.3 * noise
