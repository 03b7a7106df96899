"""1-bit Adam: AdamW until the variance is stable, then momenta of which one bit per element travels.

    warm-up        gradients --exact mean--> AdamW                                       phase "warmup"
    the switch     v <- v / (1 - beta2^T), m <- m / (1 - beta1^T)                        the step stays as long as it was
    compressed     w = beta1 w + (1 - beta1) g / (sqrt(v) + eps) --1 bit, error feedback--> w on all ranks
                   p = p (1 - lr wd) - lr w                                              phase "compressed"; v stays

Tang et al., arXiv:2102.02888, algorithm 1; there the bias correction is left out, and m = (sqrt(v) + eps) w travels. v is kept
and the same on all ranks, so both mean the same; but a block's one scale fits w, whose elements are of one size, and with
m an element of small v would be moved by scale / sqrt(v).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.codec import Codec
from pyops.onebit.base import Communicating, Verdict, on_all_ranks
from pyops.onebit.exchange import Exchange
from pyops.onebit.flat_states import Places
from pyops.onebit.frozen import corrected_beta, inverse_roots, step_frozen, take_gradients
from pyops.onebit.saving import Saving
from pyops.onebit.schedule import Warmup, logger
from pyops.onebit.uncorrected import step_uncorrected
from pyops.optim.adam import AdamW
from pyops.optim.clip import EPSILON

__all__ = ["OneBitAdam"]

WARMUP, COMPRESSED = "warmup", "compressed"
SLOW = "exp_avg_sq_slow"


class OneBitAdam(Saving, Communicating, AdamW):
    """1-bit Adam. Each rank gives the gradients of its own part of the batch; step() averages what is needed.

    params, lr, betas, eps, weight_decay: as AdamW's. One tensor per layer, or `FlatBuffer.parameter`; in groups.
    warmup_steps: exact steps before the switch, or "auto": until the second moment is stable (see Warmup).
    group: the ranks; None: all, or one alone where torch.distributed is not running. Every rank steps alike.
    model: the DistributedDataParallel or DataParallel that reduces gradients during backward in the warm-up; the optimizer
        sets its require_backward_grad_sync to False at the switch. None: nobody reduces, step() does it.
    op: "mean", or "sum" where the ranks' losses are parts of a sum: the gradient is then the sum of theirs.
    codec: how momenta travel; OneBit() by default.
    precondition: whether w travels, as above, or m, as in the paper.
    frozen_beta2: the decay of the mean of squared gradients that the switch keeps; by default 1 - 2 / warmup_steps (0.995 with
        "auto"), if that is more than beta2: a variance that never changes again should not be that of the last few batches.
        With frozen_beta2=beta2 the step is continuous to rounding.
    compat: "deepspeed" steps as DeepSpeed 0.19.6 does: no bias correction in either phase, hence longer first steps, m travels,
        with one scale for the whole of it. Its first call, which throws a gradient away, is not imitated.
    max_grad_norm: clip by the same factor on every rank. With local gradients the norm is that of the ranks' root mean square.
    zero_grad, master_weights: as AdamW's. total_steps: of the run; a warm-up that is not shorter is warned about.

    In the compressed phase an element whose variance is 0 only decays; a parameter that never had a gradient stays as it is.
    A gradient that is inf or nan on any rank skips the step on every rank and changes nothing; `grad_norm` is nan then.
    state_dict() is torch's and has the key "communication" beside it: the phase, and this rank's error buffers.

    Raises, on every rank alike: ValueError and TypeError for arguments that make no sense or differ between ranks, and for
    parameters added after the switch; DisagreementError when ranks are in different phases.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int | str,
        group: dist.ProcessGroup | None = None,
        model: nn.Module | None = None,
        op: str = "mean",
        codec: Codec | None = None,
        precondition: bool | None = None,
        frozen_beta2: float | None = None,
        compat: str | None = None,
        max_grad_norm: float | None = None,
        zero_grad: bool = False,
        master_weights: bool = False,
        total_steps: int | None = None,
    ) -> None:
        with on_all_ranks(group):
            AdamW.__init__(
                self, params, lr, betas, eps, weight_decay, zero_grad=zero_grad, master_weights=master_weights,
                max_grad_norm=float("inf") if max_grad_norm is None else max_grad_norm,
            )  # fmt: skip
            self._configure(group=group, model=model, op=op, codec=codec, compat=compat)
            who = type(self).__name__
            self.warmup = Warmup(warmup_steps, beta2=float(betas[1]), total_steps=total_steps, who=who)
            self.precondition = compat is None if precondition is None else precondition
            slow = 0.995 if warmup_steps == "auto" else max(0.0, 1 - 2 / int(warmup_steps))
            self.frozen_beta2 = (slow if compat is None else 0.0) if frozen_beta2 is None else frozen_beta2
            if not 0 <= self.frozen_beta2 < 1:
                raise ValueError(f"{who}: frozen_beta2={frozen_beta2} must be in [0, 1), and is used where more than beta2")
        self._agree_on_options(warmup_steps, max_grad_norm, precondition, frozen_beta2)
        self.phase = WARMUP
        self._exchanged: Exchange | None = None
        self._roots: Tensor | None = None
        self._ones: Tensor | None = None
        self._synchronise_backward(True)

    def _phases(self) -> tuple[str, ...]:
        return WARMUP, COMPRESSED

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for key in ("amsgrad", "maximize"):
            if group[key]:
                raise ValueError(f"{type(self).__name__}: {key}=True has no compressed phase; leave it out")

    # ------------------------------------------------------------------------------------------------ warm-up

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
        taken = self._exact_step() if self.compat is None else step_uncorrected(self)
        if taken:
            for parameter, beta, square in squares:
                slow = self._slow_mean(parameter, beta)
                # The norm is known only now.
                clip = min(1.0, float(self.max_grad_norm or 0) / (float(self._measured["grad_norm"] or 0) + EPSILON))
                slow.mul_(beta).add_(square, alpha=(1 - beta) * (clip * self._inverse_scale()) ** 2)
        return taken

    def _slow_mean(self, parameter: Tensor, beta: float) -> Tensor:
        """The slower mean of squares; where AdamW began without one, it begins from AdamW's."""
        state = self.state[parameter]
        if SLOW not in state:
            step = float(state["step"])
            beta2 = next(g["betas"][1] for g in self.param_groups if any(p is parameter for p in g["params"]))
            state[SLOW] = state["exp_avg_sq"] * ((1 - beta ** (step - 1)) / (1 - float(beta2) ** step))
        slow: Tensor = state[SLOW]
        return slow

    def _squares(self) -> list[tuple[Tensor, float, Tensor]]:
        """(parameter, decay, squared reduced gradient) wherever the switch will keep a slower mean than Adam's."""
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
                    state["exp_avg_sq"].div_(1 - (beta2 if slow is None else self.frozen_beta2) ** step)
        self.phase = COMPRESSED
        self._enter(errors=None)
        if self._roots is not None:
            self._flat.mul_(self._roots)
        if self.rank == 0:
            logger.info(
                "%s: the warm-up ended after step %d; from now on momenta travel by %s", type(self).__name__, self.steps,
                self.codec.name,
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ compressed

    def _enter(self, *, errors: dict[str, Any] | None) -> None:
        """Be in the present phase; errors: of a checkpoint, None for zeros."""
        self._synchronise_backward(self.phase == WARMUP)
        self._exchanged = None
        if self.phase == COMPRESSED:
            places = Places(self.param_groups, moved={p for p, state in self.state.items() if state})
            variances = [self.state[place.parameter]["exp_avg_sq"] for place in places]
            self._exchanged = Exchange(places, variances, codec=self.codec, communicator=self.communicator)
            if errors is not None:
                self._exchanged.errors.load_state_dict(errors)
            self._link()

    def _link(self) -> None:
        """Make every exp_avg a view of one flat tensor, and gather what else is flat."""
        assert self._exchanged is not None
        places = self._exchanged.places
        self._flat = places.gather([self.state[place.parameter]["exp_avg"] for place in places])
        self._roots, self._ones = None, None
        if self.precondition:
            eps = [float(self.param_groups[place.group]["eps"]) for place in places]
            self._roots = inverse_roots(places, [self.state[place.parameter]["exp_avg_sq"] for place in places], eps)
            self._ones = torch.ones_like(self._flat)
        for place in places:
            self.state[place.parameter]["exp_avg"] = place.view(self._flat)

    def _compressed_step(self, factor: float) -> None:
        assert self._exchanged is not None
        places = self._exchanged.places
        if not places.lie_in(self._flat, [self.state[place.parameter]["exp_avg"] for place in places]):
            self._link()  # somebody set other states
        betas = [self._beta1(place.group, place.parameter) for place in places]
        gradients = [place.parameter.grad for place in places]
        take_gradients(places, self._flat, gradients, betas, factor=factor, roots=self._roots)
        self._exchanged.average(self._flat, label="momentum")
        for g, group in enumerate(self.param_groups):
            rows = []
            for place in (place for place in places if place.group == g):
                state = self.state[place.parameter]
                variance = state["exp_avg_sq"] if self._ones is None else place.view(self._ones)
                rows.append((place.parameter, state["exp_avg"], variance, state))
            eps = group["eps"] if self._ones is None else 0.0
            step_frozen(group, rows, eps=eps, lr=group["lr"], weight_decay=group["weight_decay"])
        self._clear_gradients()

    def _beta1(self, group: int, parameter: Tensor) -> float:
        beta1 = float(self.param_groups[group]["betas"][0])
        if self.compat is not None:
            return beta1
        return corrected_beta(beta1, int(self.state[parameter]["step"]) + 1)

    # ------------------------------------------------------------------------------------------------ saving

    def _communication_state(self) -> dict[str, Any]:
        errors = {} if self._exchanged is None else self._exchanged.errors.state_dict()
        return {"errors": errors, "precondition": self.precondition, **self.warmup.state_dict()}

    def _first_state(self) -> dict[str, Any]:
        return {"errors": {}, "precondition": self.precondition, "variance_sums": []}

    def _load_communication(self, state: dict[str, Any]) -> None:
        if self.phase == COMPRESSED and state["precondition"] != self.precondition:
            raise ValueError(
                f"{type(self).__name__}: the state was made with precondition={state['precondition']}, this optimizer has "
                f"precondition={self.precondition}; build it with the same"
            )
        self.warmup.load_state_dict(state)
        self._enter(errors=state["errors"] or None)
