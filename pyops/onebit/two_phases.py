"""Two phases of an optimizer: its plain rule on exact gradients, then momenta that travel
compressed beside a kept variance.

    warm-up        gradients --exact mean--> the plain rule               phase "warmup"
    the switch     v <- v / (1 - beta2^T), m <- units m / (1 - beta1^T)   m is flat from here on
    compressed     m = beta1 m + (1 - beta1) units g                      phase "compressed"
                   m --error feedback--> m on all ranks                   v stays

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
from pyops.onebit.config import OneBitConfig, frozen_beta2_of
from pyops.onebit.steps.frozen_variance_step import corrected_beta, take_gradients
from pyops.onebit.steps.momentum_exchange import MomentumExchange
from pyops.onebit.steps.state_slots import StateSlots
from pyops.optim.one_bit import (
    COMPRESSED,
    WARMUP,
    KeptVariance,
    Warmup,
    gradient_factor,
    logger,
    variance_sum,
)

__all__ = ["TwoPhases"]


class TwoPhases(CommunicationState):
    """The part that OneBitAdam and OneBitLAMB share."""

    def _begin(self, config: OneBitConfig, *, beta2: float) -> None:
        """Check and keep the options of the two phases and of communication."""
        who = type(self).__name__
        self._configure(config)
        self.warmup = Warmup(
            config.warmup_steps, beta2=beta2, total_steps=config.total_steps, who=who
        )
        self.frozen_beta2 = frozen_beta2_of(config, who)
        self._kept_variance = KeptVariance(self.frozen_beta2, is_corrected=self.compat is None)
        self.precondition = (
            self.compat is None if config.precondition is None else config.precondition
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

    # --------------------------------------------------------------------------------------------
    # warm-up

    def _observe(self) -> float:
        if self.phase != WARMUP or not self.warmup.needs_sum(self.steps + 1):
            return 0.0
        return variance_sum(self._stepped_states())

    def _stepped_states(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(param group, state) of each parameter that has a state."""
        return [
            (group, state)
            for group in self.param_groups
            for state in (self.state.get(p) for p in group["params"])
            if state
        ]

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
            # The norm is known only now.
            clip = gradient_factor(
                float(self._measured["grad_norm"] or 0),
                max_grad_norm=float(self.max_grad_norm or 0),
                grad_scale=getattr(self, "grad_scale", None),
                summed=1,
            )
            for group, parameter, square in squares:
                self._kept_variance.track(group, self.state[parameter], square, scale=clip**2)
        return taken

    @abstractmethod
    def _uncorrected_step(self) -> bool:
        """DeepSpeed's step of the warm-up, on exactly reduced gradients; False when it had to be
        skipped."""

    def _squares(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        """(param group, parameter, squared reduced gradient) wherever the slower mean runs."""
        return [
            (group, p, p.grad.float().square())
            for group in self.param_groups
            if self._kept_variance.is_tracked(group)
            for p in group["params"]
            if p.grad is not None
        ]

    def _advance(self, verdict: Verdict) -> None:
        if self.phase == WARMUP:
            wanted = self.warmup.needs_sum(self.steps)
            if self.warmup.is_last(self.steps, verdict.extra if wanted else None):
                self._switch()

    def _switch(self) -> None:
        """From exact gradients to compressed momenta."""
        self._kept_variance.freeze(self._stepped_states())
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

    # --------------------------------------------------------------------------------------------
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

    # --------------------------------------------------------------------------------------------
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
