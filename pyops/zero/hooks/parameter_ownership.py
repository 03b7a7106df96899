"""What a ZeroOptimizer has put in its place, and whether it is there still, before forward and
before a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pyops.flat import InPlace, claim, release
from pyops.torch_private import in_backward
from pyops.zero.hooks.sharded_gradients import ShardedGradients, wrapped_in_ddp
from pyops.zero.hooks.unshard_hooks import UnshardHooks
from pyops.zero.layout.parameters import FlatParameters

__all__ = ["ParameterOwnership"]

FIX = (
    "precision= casts the model, model_state_dict() and load_model_state_dict() save and "
    "load it, optimizer.close() lets go "
    "of it"
)
# what DistributedDataParallel asks of a module when it is made
IGNORED = "_ddp_params_and_buffers_to_ignore"


class Unwrapped:
    """The names of parameters that DistributedDataParallel is to leave alone: it reads them first,
    and is told that it must not be there at all."""

    def __iter__(self) -> Iterator[str]:
        raise wrapped_in_ddp()

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()  # a copy of the model is nobody's


class ParameterOwnership:
    """The parameters of `model` in `flats` and in the units of `gathering`: claimed, and looked
    after.

    Args:
        others: Parameters that are claimed alone: of a model that is not trained.
    """

    def __init__(
        self,
        model: nn.Module,
        flats: Sequence[FlatParameters],
        gathering: UnshardHooks,
        gradients: ShardedGradients,
        *,
        others: Iterable[nn.Parameter] = (),
    ) -> None:
        self._flats = list(
            dict.fromkeys([*flats, *(flat for unit in gathering.units for flat in unit.flats)])
        )
        self._gradients = gradients
        self._in_place = InPlace("ZeroOptimizer", model, self._flats, fix=FIX)
        self._claimed = [*(p for flat in self._flats for p in flat.parameters), *others]
        claim(self._claimed, gradients, who="ZeroOptimizer")
        before, self._unwrapped = vars(model).get(IGNORED), Unwrapped()
        self._model, self._ignored = model, None if isinstance(before, Unwrapped) else before
        setattr(model, IGNORED, self._unwrapped)

    def before_forward(self, *_: Any) -> None:
        """Of the model: a hook."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward():
            self.check()
        self._gradients.prepare()

    def check(self) -> None:
        """ValueError where a parameter was moved or replaced; the other ranks hear of it in their
        next collective."""
        error = self._in_place.problem()
        if error is None:
            return
        if self._gradients.communicator is not None:
            self._gradients.communicator.leave(error, device=self._flats[0].device)
        raise error

    def remove(self) -> None:
        """Let others have the parameters."""
        if vars(self._model).get(IGNORED) is self._unwrapped:
            delattr(self._model, IGNORED)
            if self._ignored is not None:
                setattr(self._model, IGNORED, self._ignored)
        release(self._claimed, self._gradients)
