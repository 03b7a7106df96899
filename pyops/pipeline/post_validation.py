"""Steps that are taken before the norm of the gradients is known, and taken back when it says so
(Qi et al., 2024, section 4).

with a barrier   rank 0  ...  1B3 1W3 |   wait   | norm | step | F F F     a rank that is done waits
                 rank 1  ...      1B3 1W3        | norm | step | F F F     for all others
validated later  rank 0  ...  1B3 1W3 | step | F F F | norm known, B ...   the sum travels meanwhile
                 rank 1  ...      1B3 1W3 | step | F F F | norm known, B ...

If the norm is above its limit, or not finite, every rank gives up the forwards it has done since,
puts back what its step changed, steps again with scaled gradients or not at all, and begins anew:
parameters have the bits of a run with the barrier.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from pyops.comm.buckets.grad_norm import sum_of_squares
from pyops.comm.collectives.functional import all_reduce
from pyops.pipeline.runtime.pipeline import Pipeline
from pyops.pipeline.schedules.action import Action
from pyops.random import RandomStates

__all__ = ["PostValidation"]


class PostValidation:
    """Trains `pipeline` with `optimizer`, any torch.optim.Optimizer over this rank's parameters; a
    call of `step` is a step.

    Until a step is validated a rank keeps a copy of its parameters and of the optimizer's states,
    and the step's gradients: for AdamW in float32 12 + 4 bytes for each parameter on top of the 16
    of parameter, gradient and states; with the next step's first backward the gradients are gone,
    the memory of the copies is used again. The pipeline calls this object after its actions
    (`Pipeline.on_action`). `finish` at the end, and before parameters are looked at, evaluated or
    saved.

    grad_norm: of the last validated step, before scaling. skipped: steps left out. redone: steps
    that were taken back.

    Args:
        max_grad_norm: Gradients of the whole pipeline are scaled down to this 2-norm; None: a step
            is only left out where they are not finite. A rank that sees by its own gradients alone
            that the step can't stand does not try it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}; give a positive number, or None not to clip"
            )
        if not pipeline.schedule.flushes:
            raise ValueError(
                f"the schedule {pipeline.schedule.name} takes its steps itself; take one "
                "that flushes, such as zb1p"
            )
        for option, key in (("zero_grad", "zeroes_gradients"), ("max_grad_norm", "max_grad_norm")):
            if getattr(optimizer, key, None):
                raise ValueError(
                    f"the optimizer was made with {option}={getattr(optimizer, key)}, "
                    "which changes gradients of a step that "
                    f"may be taken again; leave {option} out"
                )
        self.pipeline, self.optimizer, self.max_grad_norm = pipeline, optimizer, max_grad_norm
        self.grad_norm: float | None = None
        self.skipped = self.redone = 0
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        order = () if pipeline.group is None else pipeline.schedule.ranks[pipeline.rank]
        first = next((place for place, action in enumerate(order) if action.kind in "BI"), 0)
        self._last_forward = (
            order[first - 1] if first else None
        )  # after it the gradients of the step before are needed no more
        self._copies = _Copies(optimizer)
        self._gradients: list[Tensor | None] = []
        self._work: Any = None
        self._eager = self._pending = False
        pipeline.on_action(self._after)

    def step(
        self, batch: Any = None, target: Any = None, *, scale: float = 1.0, **named: Any
    ) -> Tensor:
        """`Pipeline.step`, then a step of the optimizer, which is validated in the next call, and
        gradients are dropped.

        Args:
            batch, target, scale, named: As for `Pipeline.step`.

        Returns:
            The loss of the batch.
        """
        if self._last_forward is None:
            self.finish()
        seeds = RandomStates() if self._pending else None
        given = {"batch": batch, "target": target, "scale": scale, **named}
        try:
            loss = self.pipeline.step(**given)
        except Exception:
            if seeds is None or not self._pending or self._stands():
                raise
            self._repair()
            seeds.restore()
            loss = self.pipeline.step(**given)
        self._try()
        return loss

    def finish(self) -> float | None:
        """Validate the last step. Its gradient's norm, on every rank, which all call this."""
        if self._pending and not self._stands():
            self._repair()
        return self.grad_norm

    # ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _try(self) -> None:
        """Say what this rank's gradients add to the norm, and step without waiting for the
        others."""
        gradients = [p.grad for p in self.pipeline.counted() if p.grad is not None]
        squares = sum_of_squares(gradients, device="cpu")[0]
        self._eager = self._allows(float(squares.sqrt().float()))
        group = self.pipeline.group
        self._work = (
            squares
            if group is None
            else all_reduce(squares, group=group, async_op=True, label="norm to be validated")
        )
        self._copies.take(with_values=self._eager)
        if self._eager:
            self.optimizer.step()
        self._gradients = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._pending = True

    def _after(self, action: Action) -> None:
        """The last forward before the first backward: what was computed with a step that does not
        stand is given up."""
        if action == self._last_forward and self._pending and not self._stands():
            raise RuntimeError("the step before does not stand")

    def _stands(self) -> bool:
        """Whether the last step is right as it is; waits for the norm."""
        if self._work is not None:
            total: Tensor = self._work if isinstance(self._work, Tensor) else self._work.wait()
            self.grad_norm, self._work = float(total.sqrt().float()), None
        assert self.grad_norm is not None
        stands = self._allows(self.grad_norm)  # then it does by any rank's own gradients
        if stands:
            self._settle()
        return stands

    def _allows(self, norm: float) -> bool:
        """Whether gradients of this norm are stepped with as they are, as
        torch.nn.utils.clip_grad_norm_ sees it."""
        if self.max_grad_norm is None or not math.isfinite(norm):
            return math.isfinite(norm)
        return bool(self.max_grad_norm / (torch.tensor(norm, device="cpu") + 1e-6) >= 1.0)

    @torch.no_grad()
    def _repair(self) -> None:
        """Put back what the step changed, and take it as the norm says."""
        assert self.grad_norm is not None
        now = self._copies.put_back(with_values=self._eager)
        self.redone += self._eager
        if math.isfinite(self.grad_norm):
            for p, gradient in zip(self._parameters, self._gradients, strict=True):
                p.grad = gradient
            if self.max_grad_norm is not None:
                norm = torch.tensor(self.grad_norm, device="cpu")
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self.max_grad_norm, norm)
            self.optimizer.step()
        else:
            self.skipped += 1
        for group, options in zip(self.optimizer.param_groups, now, strict=True):
            group.update(options)
        self._settle()

    def _settle(self) -> None:
        for p in self._parameters:
            p.grad = None
        self._gradients = []
        self._pending = False


class _Copies:
    """What a step of `optimizer` changes, as it was before: parameters, states, and the options of
    the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._values: dict[Any, Tensor] = {}
        self._states: dict[Any, dict[str, Any]] = {}
        self._options: list[dict[str, Any]] = []

    def take(self, *, with_values: bool) -> None:
        """Copy; into the memory of the last copies.

        Args:
            with_values: Parameters and states too.
        """
        self._options = [_options(group) for group in self.optimizer.param_groups]
        if not with_values:
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    self._values.pop(p, None)
                    continue
                self._values[p] = _copied(p.detach(), self._values.get(p))
                before = self._states.get(p, {})
                states = self.optimizer.state.get(p, {})
                self._states[p] = {
                    key: _copied(value, before.get(key)) for key, value in states.items()
                }

    def put_back(self, *, with_values: bool) -> list[dict[str, Any]]:
        """As it was; the options of the groups as they are now."""
        now = [_options(group) for group in self.optimizer.param_groups]
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            group.update(options)
        for p, value in self._values.items() if with_values else ():
            p.copy_(value)
            found, before = self.optimizer.state[p], self._states[p]
            for key in [key for key in found if key not in before]:
                del found[key]
            for key, old in before.items():
                if isinstance(old, Tensor) and isinstance(found.get(key), Tensor):
                    found[key].copy_(old)
                else:
                    found[key] = copy.deepcopy(old)
            if not before:
                del self.optimizer.state[p]
        return now


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _copied(value: Any, memory: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if isinstance(memory, Tensor) and (memory.shape, memory.dtype, memory.device) == (
        value.shape,
        value.dtype,
        value.device,
    ):
        return memory.copy_(value)
    return value.clone()
