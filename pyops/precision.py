"""Numbers of 16 bits: which dtype the model has, and one dynamic loss scale that serves every way
of training.

    loss * scale -> backward -> gradients * scale -> inf or nan on any rank?  no:  unscale, step
                                                                              yes: change nothing
    scale: doubled after `window` good steps; halved once `hysteresis` is used up

    65536 65536 32768 32768 ...    hysteresis 2: the first overflow is forgiven, the second halves
     inf   inf   ok    ok

Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; the state machine with
hysteresis is Megatron's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.failure import naming_lost_ranks
from pyops.mesh import check_initialized
from pyops.ops.memory import require_memory
from pyops.ops.optimizers.grad_norm import squared_norm

__all__ = ["PRECISIONS", "LossScale", "LossScaler", "Precision", "overflowed"]


@dataclass(frozen=True)
class Precision:
    """What a model computes in."""

    name: str
    """As in [precision] dtype."""

    dtype: torch.dtype
    """Of parameters, activations and gradients."""

    master_weights: bool
    """Whether the optimizer keeps float32 copies of the parameters."""

    scaled: bool
    """Whether gradients would vanish without a loss scale."""


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32, master_weights=False, scaled=False),
    "bf16": Precision("bf16", torch.bfloat16, master_weights=True, scaled=False),
    "fp16": Precision("fp16", torch.float16, master_weights=True, scaled=True),
}
"""By name."""


class LossScale:
    """The state machine, on the host and without communication: `update(overflow)` after every
    step.

    scale: the present one. skipped: overflows so far. good_steps: since the last overflow or
    growth. hysteresis_left.

    Args:
        initial: The first scale.
        factor: What it is multiplied and divided by.
        window: Good steps in a row after which it grows.
        hysteresis: Overflows that it takes to lower it; filled up again when it grows, or with
            consecutive_hysteresis by every good step, so that only overflows in a row count.
        minimum: It is not lowered further, which is said in a warning, and the training goes on.

    Raises:
        ValueError: For values that make no sense.
    """

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        factor: float = 2.0,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
    ) -> None:
        for name, value, sound, expected in [
            ("factor", factor, factor > 1 and math.isfinite(factor), "a number above 1, such as 2"),
            ("window", window, isinstance(window, int) and window >= 1, "1 step or more"),
            (
                "hysteresis",
                hysteresis,
                isinstance(hysteresis, int) and hysteresis >= 1,
                "1 or more",
            ),
            ("minimum", minimum, 0 < minimum < math.inf, "above 0"),
            ("initial", initial, minimum <= initial < math.inf, f"at least the minimum, {minimum}"),
        ]:
            if not sound:
                raise ValueError(f"{name} of the loss scale is {value!r}; it must be {expected}")
        self.scale, self.factor, self.window, self.minimum = (
            float(initial),
            float(factor),
            window,
            float(minimum),
        )
        self.hysteresis, self.consecutive_hysteresis = hysteresis, consecutive_hysteresis
        self.hysteresis_left, self.good_steps, self.skipped = hysteresis, 0, 0

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in sorted(vars(self).items()))
        return f"LossScale({fields})"

    def update(self, overflow: bool) -> None:
        """Take note of a step, whether its gradients had an inf or a nan."""
        if overflow:
            self.good_steps = 0
            self.skipped += 1
            self._lower()
            return
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        if self.good_steps == self.window:
            self.good_steps = 0
            self.hysteresis_left = self.hysteresis
            if (
                self.scale * self.factor < torch.finfo(torch.float32).max
            ):  # the loss is multiplied in fp32
                self.scale *= self.factor

    def _lower(self) -> None:
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            return
        if self.scale == self.minimum:
            warnings.warn(
                f"gradients overflow at the smallest loss scale, {self.minimum:g}: the "
                "step is skipped and training goes on. "
                "If it stays like this, the loss itself is not finite: lower the "
                "learning rate, or train in bf16",
                RuntimeWarning,
                stacklevel=4,
            )
        self.scale = max(self.scale / self.factor, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: numbers only. The options stay those it is built with."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "hysteresis_left": self.hysteresis_left,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ValueError: Before anything is changed, for what is none.
        """
        lacking = [
            key for key in ("scale", "good_steps", "hysteresis_left", "skipped") if key not in state
        ]
        if lacking:
            raise ValueError(
                f"the state of a loss scale lacks {lacking}; pass what state_dict() returned"
            )
        scale = float(state["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"the state's loss scale is {scale}; it must be a number above 0")
        self.scale = max(scale, self.minimum)
        self.good_steps = int(state["good_steps"]) % self.window
        self.hysteresis_left = min(max(1, int(state["hysteresis_left"])), self.hysteresis)
        self.skipped = int(state["skipped"])


@torch.no_grad()
def overflowed(gradients: Iterable[Tensor], *, group: dist.ProcessGroup | None = None) -> Tensor:
    """fp32 [1], 1 where any gradient of any rank of the group has an inf or a nan, else 0: alike on
    all ranks. A collective.

    Reads the gradients once and does not wait for the device. Call it on every rank, also where
    there are no gradients.
    """
    found: dict[torch.device, Tensor] = {}
    lists: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.dtype in (torch.float32, torch.float16, torch.bfloat16) and _dense(values):
            lists.setdefault(values.device, []).append(values)
        else:
            bad = (~values.isfinite()).any().float().reshape(1)
            found[values.device] = (
                torch.maximum(found[values.device], bad) if values.device in found else bad
            )
    for device, tensors in lists.items():
        bad = (squared_norm(tensors)[1:] != 0).float()
        found[device] = torch.maximum(found[device], bad) if device in found else bad
    check_initialized("overflowed", group)
    together = dist.is_initialized() and dist.get_world_size(group) > 1
    nccl = together and "nccl" in str(dist.get_backend(group))
    home = next(
        iter(found),
        torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu"),
    )
    flag = torch.zeros(1, device=home)
    for bad in found.values():
        flag = torch.maximum(flag, bad.to(home))
    if together:
        with naming_lost_ranks("the search for inf and nan in gradients", group=group):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


class LossScaler:
    """As torch.amp.GradScaler, with one difference: an overflow on any rank of `group` skips the
    step on all.

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if scaler.update():          # False: gradients had an inf or a nan, and nothing was changed
            schedule.step()

    An optimizer that unscales by itself (`_step_supports_amp_scaling`: pyops.optim's, torch's fused
    ones) reads the gradients once more and no host waits; for others they are unscaled in place.
    `step` and `unscale_` are collectives, to be called on all ranks alike, for each optimizer once
    between two updates.

    Args:
        options: Those of LossScale. enabled=False (fp32, bf16) passes everything through.
        group: The ranks that step together; None: all. `loss_scale` is the state machine.
    """

    def __init__(
        self, *, group: dist.ProcessGroup | None = None, enabled: bool = True, **options: Any
    ) -> None:
        check_initialized("LossScaler", group)
        self.loss_scale, self.enabled, self._group = LossScale(**options), enabled, group
        self._found: dict[int, Tensor] = {}  # by optimizer: whether its gradients overflowed
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def get_scale(self) -> float:
        """The present loss scale; 1 when not enabled."""
        return self.loss_scale.scale if self.enabled else 1.0

    def scale(self, loss: Any) -> Any:
        """The loss, or each in a list or tuple of them, times the scale."""
        if isinstance(loss, list | tuple):
            return type(loss)(self.scale(one) for one in loss)
        if isinstance(loss, Tensor) and loss.layout == torch.strided:
            require_memory(loss, "the loss")
        return loss * self.loss_scale.scale if self.enabled else loss

    def unscale_(
        self, optimizer: torch.optim.Optimizer, *, gradients: Iterable[Tensor] | None = None
    ) -> None:
        """Divide the gradients by the scale in place, to look at them or clip them before `step`.

        Args:
            gradients: Where they are, if not in .grad of the optimizer's parameters.
        """
        if not self.enabled:
            return
        if id(optimizer) in self._unscaled or id(optimizer) in self._stepped:
            raise RuntimeError(
                "unscale_() was called twice, or after step(), since the last update(); "
                "call update() in between"
            )
        held = self._gradients(optimizer, gradients)
        self._look(optimizer, held)
        self._divide(held)
        self._unscaled.add(id(optimizer))

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        gradients: Iterable[Tensor] | None = None,
    ) -> Any:
        """`optimizer.step(*args)` on unscaled gradients; not, on any rank, if any rank's have an
        inf or a nan.

        Returns what the optimizer did.

        Args:
            gradients: As for `unscale_`.
        """
        if not self.enabled:
            return optimizer.step(*args)
        if id(optimizer) in self._stepped:
            raise RuntimeError(
                "step() was called twice since the last update(); call update() in between"
            )
        held = self._gradients(optimizer, gradients)
        found = self._found.get(id(optimizer))
        if found is None:
            found = self._look(optimizer, held)
        self._stepped.add(id(optimizer))
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            scale = torch.full((), self.loss_scale.scale, device=found.device)
            told: Any = optimizer
            told.grad_scale, told.found_inf = (
                None if id(optimizer) in self._unscaled else scale,
                found.reshape(()),
            )
            try:
                return optimizer.step(*args)
            finally:
                del told.grad_scale, told.found_inf
        if float(found):
            return None
        if id(optimizer) not in self._unscaled:
            self._divide(held)
        return optimizer.step(*args)

    def update(self) -> bool:
        """Set the scale for the next step; whether all that was stepped since the last update was
        really stepped."""
        if not self.enabled:
            return True
        if not self._found:
            raise RuntimeError("update() has no step to judge; call step(optimizer) before it")
        overflow = any(bool(float(found)) for found in self._found.values())
        self.loss_scale.update(overflow)
        self._found, self._unscaled, self._stepped = {}, set(), set()
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """LossScale's, alike on all ranks: put it into a checkpoint's state."""
        return self.loss_scale.state_dict() if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; an empty one, of a scaler that was not enabled, changes
        nothing."""
        if self.enabled and state:
            self.loss_scale.load_state_dict(state)

    def _look(self, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
        self._found[id(optimizer)] = overflowed(gradients, group=self._group)
        return self._found[id(optimizer)]

    @torch.no_grad()
    def _divide(self, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            (gradient._values() if gradient.is_sparse else gradient).mul_(
                1.0 / self.loss_scale.scale
            )

    @staticmethod
    def _gradients(
        optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor] | None
    ) -> list[Tensor]:
        if gradients is not None:
            return list(gradients)
        return [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
