"""Two phases of an optimizer: its plain rule on exact gradients, then momenta that travel
compressed beside a kept variance.

    warm-up        gradients --exact mean--> the plain rule                              phase "warmup"
    the switch     v <- v / (1 - beta2^T), m <- units m / (1 - beta1^T)                  m is flat from here on
    compressed     m = beta1 m + (1 - beta1) units g --error feedback--> m on all ranks  phase "compressed"; v stays

OneBitAdam and OneBitLAMB say what the plain rule is, in which units the momentum travels, and how
it moves parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from pyops.onebit.communicating import Verdict
from pyops.onebit.communication_state import CommunicationState
from pyops.onebit.steps.frozen_variance_step import corrected_beta, take_gradients
from pyops.onebit.steps.momentum_exchange import MomentumExchange
from pyops.onebit.steps.state_slots import StateSlots
from pyops.optim.fused.checks import check_number, check_switch
from pyops.optim.fused.clip import EPSILON
from pyops.optim.one_bit_warmup import Warmup, logger

__all__ = ["TwoPhases"]

WARMUP, COMPRESSED = "warmup", "compressed"
SLOW = "exp_avg_sq_slow"


class TwoPhases(CommunicationState):
    """The part that OneBitAdam and OneBitLAMB share."""

    def _begin(
        self,
        *,
        warmup_steps: int | str,
        beta2: float,
        total_steps: int | None,
        precondition: bool | None,
        frozen_beta2: float | None,
    ) -> None:
        """Check and keep the options of the two phases; `_configure` was called before."""
        who = type(self).__name__
        self.warmup = Warmup(warmup_steps, beta2=beta2, total_steps=total_steps, who=who)
        if precondition is not None:
            check_switch(precondition, name="precondition", who=who)
        if frozen_beta2 is not None:
            check_number(frozen_beta2, name="frozen_beta2", who=who)
        self.precondition = self.compat is None if precondition is None else precondition
        slow = 0.995 if warmup_steps == "auto" else max(0.0, 1 - 2 / int(warmup_steps))
        self.frozen_beta2 = (
            (slow if self.compat is None else 0.0) if frozen_beta2 is None else frozen_beta2
        )
        if not 0 <= self.frozen_beta2 < 1:
            raise ValueError(
                f"{who}: frozen_beta2={frozen_beta2} must be in [0, 1), such as 0.999, "
                "or None; used where more than beta2"
            )

    def _start(self) -> None:
        """Be in the warm-up."""
        self.phase = WARMUP
        self._exchanged: MomentumExchange | None = None
        self._roots: Tensor | None = None
        self._synchronise_backward(True)

    def _phases(self) -> tuple[str, ...]:
        return WARMUP, COMPRESSED

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise ValueError(
                    f"{type(self).__name__}: {key}=True has no compressed phase; leave it out"
                )

    # ------------------------------------------------------------------------------------------------
    # warm-up

    def _observe(self) -> float:
        if self.phase != WARMUP or not self.warmup.wants_sum(self.steps + 1):
            return 0.0
        total = 0.0
        for group in self.param_groups:
            beta2 = float(group["betas"][1])
            for state in (self.state.get(p) for p in group["params"]):
                if state and (step := float(state["step"])):
                    total += float(state["exp_avg_sq"].sum(dtype=torch.float64)) / (1 - beta2**step)
        return total

    def _take(self, verdict: Verdict) -> bool:
        if self.phase == COMPRESSED:
            self._measured["grad_norm"] = torch.tensor(verdict.norm, device=self.device)
            self._compressed_step(self._clip_factor(verdict))
            return True
        if self.model is None:
            self._reduce_gradients()
        squares = self._squares()
        taken = self._exact_step() if self.compat is None else self._uncorrected_step()
        if taken:
            for parameter, beta, square in squares:
                slow = self._slow_mean(parameter, beta)
                # The norm is known only now.
                clip = min(
                    1.0,
                    float(self.max_grad_norm or 0)
                    / (float(self._measured["grad_norm"] or 0) + EPSILON),
                )
                slow.mul_(beta).add_(square, alpha=(1 - beta) * (clip * self._inverse_scale()) ** 2)
        return taken

    @abstractmethod
    def _uncorrected_step(self) -> bool:
        """DeepSpeed's step of the warm-up, on exactly reduced gradients; False when it had to be
        skipped."""

    def _slow_mean(self, parameter: Tensor, beta: float) -> Tensor:
        """The slower mean of squares; where AdamW began without one, it begins from AdamW's."""
        state = self.state[parameter]
        if SLOW not in state:
            step = float(state["step"])
            beta2 = next(
                g["betas"][1] for g in self.param_groups if any(p is parameter for p in g["params"])
            )
            state[SLOW] = state["exp_avg_sq"] * (
                (1 - beta ** (step - 1)) / (1 - float(beta2) ** step)
            )
        slow: Tensor = state[SLOW]
        return slow

    def _squares(self) -> list[tuple[Tensor, float, Tensor]]:
        """(parameter, decay, squared reduced gradient) wherever the switch will keep a slower mean
        than Adam's."""
        return [
            (p, self.frozen_beta2, p.grad.float().square())
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and self.frozen_beta2 > float(group["betas"][1])
        ]

    def _advance(self, verdict: Verdict) -> None:
        if self.phase == WARMUP:
            wanted = self.warmup.wants_sum(self.steps)
            if self.warmup.ended(self.steps, verdict.extra if wanted else None):
                self._switch()

    def _switch(self) -> None:
        """From exact gradients to compressed momenta."""
        for group in self.param_groups:
            beta1, beta2 = map(float, group["betas"])
            for state in (self.state[p] for p in group["params"] if self.state.get(p)):
                step, slow = float(state["step"]), state.pop(SLOW, None)
                if slow is not None:
                    state["exp_avg_sq"].copy_(slow)
                if self.compat is None and step:
                    state["exp_avg"].div_(1 - beta1**step)
                    state["exp_avg_sq"].div_(
                        1 - (beta2 if slow is None else self.frozen_beta2) ** step
                    )
        self.phase = COMPRESSED
        self._enter(errors=None)
        if self._roots is not None:
            self._flat.mul_(self._roots)
        if self.rank == 0:
            logger.info(
                "%s: the warm-up ended after step %d; from now on momenta travel by %s",
                type(self).__name__,
                self.steps,
                self.codec.name,
            )

    # ------------------------------------------------------------------------------------------------
    # compressed

    def _enter(self, *, errors: dict[str, Any] | None) -> None:
        """Be in the present phase; errors: of a checkpoint, None for zeros."""
        self._synchronise_backward(self.phase == WARMUP)
        self._exchanged = None
        if self.phase == COMPRESSED:
            slots = StateSlots(
                self.param_groups, moved={p for p, state in self.state.items() if state}
            )
            variances = [self.state[slot.parameter]["exp_avg_sq"] for slot in slots]
            self._exchanged = MomentumExchange(
                slots, variances, codec=self.codec, communicator=self.communicator
            )
            if errors is not None:
                self._exchanged.errors.load_state_dict(errors)
            self._link()

    def _link(self) -> None:
        """Make every exp_avg a view of one flat tensor, and gather what else is flat."""
        assert self._exchanged is not None
        slots = self._exchanged.slots
        self._flat = slots.gather([self.state[slot.parameter]["exp_avg"] for slot in slots])
        for slot in slots:
            self.state[slot.parameter]["exp_avg"] = slot.view(self._flat)
        self._roots = self._weigh(slots)

    def _linked(self, slots: StateSlots) -> bool:
        """Whether the states still are what `_link` made them."""
        return slots.lie_in(self._flat, [self.state[slot.parameter]["exp_avg"] for slot in slots])

    @abstractmethod
    def _weigh(self, slots: StateSlots) -> Tensor | None:
        """Flat: by what a gradient is multiplied before it joins the momentum that travels; None:
        by nothing."""

    @abstractmethod
    def _apply(self, slots: StateSlots, betas: list[float], before: Tensor | None) -> None:
        """Move the parameters by what came back. before: the momentum of the last step, if
        `_needs_last`."""

    _needs_last = False

    def _compressed_step(self, factor: float) -> None:
        assert self._exchanged is not None
        slots = self._exchanged.slots
        if not self._linked(slots):
            self._link()  # somebody set other states
        betas = self._first_betas(slots)
        before = self._flat.clone() if self._needs_last else None
        gradients = [slot.parameter.grad for slot in slots]
        take_gradients(slots, self._flat, gradients, betas, factor=factor, roots=self._roots)
        self._exchanged.average(self._flat, label="momentum")
        self._apply(slots, betas, before)
        self._clear_gradients()

    def _first_betas(self, slots: StateSlots) -> list[float]:
        """For each slot, with how much of itself the momentum goes into this step."""
        betas = [float(self.param_groups[slot.group]["betas"][0]) for slot in slots]
        if self.compat is not None or not betas:
            return betas
        steps = torch.stack([self.state[slot.parameter]["step"] for slot in slots])
        counts = steps.tolist()  # one look at the device for all
        return [
            corrected_beta(beta, int(count) + 1) for beta, count in zip(betas, counts, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------
    # saving

    def _communication_state(self) -> dict[str, Any]:
        errors = {} if self._exchanged is None else self._exchanged.errors.state_dict()
        return {"errors": errors, "precondition": self.precondition, **self.warmup.state_dict()}

    def _first_state(self) -> dict[str, Any]:
        return {"errors": {}, "precondition": self.precondition, "variance_sums": []}

    def _load_communication(self, state: dict[str, Any]) -> None:
        if self.phase == COMPRESSED and state["precondition"] != self.precondition:
            raise ValueError(
                f"{type(self).__name__}: the state was made with "
                f"precondition={state['precondition']}, this optimizer has "
                f"precondition={self.precondition}; build it with the same"
            )
        self.warmup.load_state_dict(state)
        self._enter(errors=state["errors"] or None)
