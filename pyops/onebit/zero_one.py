"""0/1 Adam: exact gradients now and then for the variance, bits in between, and after its freeze steps without any message.

    phase "variance"   exact round        m, v from the exact gradient            at steps whose distance doubles
                       compressed round   m from gradients of one bit             all others
    phase "local"      alone              each rank moves by its own momentum     v stays
                       message            the sum of these moves, one bit         at steps whose distance doubles, to a cap

Lu et al., arXiv:2202.06009, algorithms 1 and 2. Otherwise than there: means are bias-corrected; what travels is measured in
units of the step, g / (sqrt(v) + eps), as in OneBitAdam; decay is applied to the common parameters (see local_steps.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.codec import Codec
from pyops.onebit.adam import OneBitAdam
from pyops.onebit.base import Verdict
from pyops.onebit.exchange import Exchange
from pyops.onebit.flat_states import Places
from pyops.onebit.frozen import corrected_beta, step_frozen, take_gradients
from pyops.onebit.local_steps import LocalSteps, load_rows, rows_of
from pyops.onebit.rounds import COMPRESSED, EXACT, LOCAL, Rounds, RoundSchedule
from pyops.onebit.schedule import logger
from pyops.ops.grad_norm import squared_norm
from pyops.optim.clip import EPSILON
from pyops.optim.layout import is_dense

__all__ = ["ZeroOneAdam"]

VARIANCE, ALONE = "variance", "local"


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam. Arguments that are not here: see OneBitAdam.

    warmup_steps: when the variance freezes (DeepSpeed's var_freeze_step); "auto": an eighth of total_steps, else 250.
    var_update_scaler: so many exact rounds at each distance 1, 2, 4 ...
    local_step_scaler: steps after which the distance between messages doubles. local_step_clipper: its largest value.
    With the defaults a run of 2,000 steps sends less than 1/60 of what an fp32 all-reduce in each step would:
    `rounds(2000)` counts.

    Within a local interval the ranks' parameters differ. state_dict() holds this rank's; loaded on another number of ranks,
    all go on from the mean. A small message in every step, of a few bytes, finds what is not finite, and the common norm.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int | str = "auto",
        var_update_scaler: int = 2,
        local_step_scaler: int = 100,
        local_step_clipper: int = 16,
        group: dist.ProcessGroup | None = None,
        model: nn.Module | None = None,
        op: str = "mean",
        codec: Codec | None = None,
        max_grad_norm: float | None = None,
        zero_grad: bool = False,
        master_weights: bool = False,
        total_steps: int | None = None,
    ) -> None:
        if warmup_steps == "auto":
            warmup_steps = max(1, total_steps // 8) if total_steps else 250
        freeze = warmup_steps if isinstance(warmup_steps, int) else 1  # of anything else the base says what is wrong
        self.schedule = RoundSchedule(max(1, freeze), var_update_scaler, local_step_scaler, local_step_clipper)
        super().__init__(
            params, lr, betas, eps, weight_decay, warmup_steps=warmup_steps, group=group, model=model, op=op, codec=codec,
            frozen_beta2=0.0, max_grad_norm=max_grad_norm, zero_grad=zero_grad, master_weights=master_weights,
            total_steps=total_steps,
        )  # fmt: skip
        self._agree_on_options(self.schedule)
        self.phase, self.updates = VARIANCE, 0
        self._alone: LocalSteps | None = None

    def rounds(self, steps: int) -> Rounds:
        """How many of the first `steps` steps communicate exactly, compressed, or not at all."""
        return self.schedule.rounds(steps)

    def _phases(self) -> tuple[str, ...]:
        return VARIANCE, ALONE

    def _observe(self) -> float:
        return 0.0

    # ------------------------------------------------------------------------------------------------ a step

    def _take(self, verdict: Verdict) -> bool:
        kind = self.schedule.kind(self.steps + 1)
        if self.phase == VARIANCE and kind == EXACT:
            return self._exact_round()
        self._measured["grad_norm"] = torch.tensor(verdict.norm, device=self.device)
        if self.phase == VARIANCE:
            self._gradient_round(self._clip_factor(verdict))
        else:
            self._local_step(self._clip_factor(verdict), message=kind == COMPRESSED)
        self._clear_gradients()
        return True

    def _advance(self, verdict: Verdict) -> None:
        if self.steps == self.schedule.var_freeze_step:
            self.phase = ALONE
            self._enter(errors=None)
            assert self._roots is not None
            self._flat.mul_(self._roots)
            if self.rank == 0:
                logger.info("%s: the variance is kept as it is after step %d", type(self).__name__, self.steps)
        self._synchronise_backward(self.schedule.kind(self.steps + 1) == EXACT)

    def _exact_round(self) -> bool:
        if self.model is None:
            self._reduce_gradients()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not params:
            return True
        total, bad = squared_norm([p.grad if is_dense(p.grad) else p.grad.contiguous() for p in params]).tolist()
        norm = total**0.5 * self._inverse_scale()
        self._measured["grad_norm"] = torch.tensor(norm, device=self.device)
        if bad:
            self._clear_gradients()
            return False
        factor = min(1.0, float(self.max_grad_norm or 0) / (norm + EPSILON)) * self._inverse_scale()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._complete(group, p, self.state[p])
        if self._exchanged is None or len(self._exchanged.places) != sum(bool(s) for s in self.state.values()):
            self._enter(errors=None)
        assert self._exchanged is not None
        places = self._exchanged.places
        self._relink()
        for place in places:
            beta = corrected_beta(float(self.param_groups[place.group]["betas"][1]), self.updates + 1)
            variance = self.state[place.parameter]["exp_avg_sq"].mul_(beta)
            if place.parameter.grad is not None:
                g = place.parameter.grad.float() * factor
                variance.addcmul_(g, g, value=1 - beta)
        betas = [self._beta1(place.group, place.parameter) for place in places]
        take_gradients(places, self._flat, [place.parameter.grad for place in places], betas, factor=factor)
        self.updates += 1
        self._exchanged.bury([self.state[place.parameter]["exp_avg_sq"] for place in places])
        self._link()
        self._move()
        self._clear_gradients()
        return True

    def _gradient_round(self, factor: float) -> None:
        if self._exchanged is None:  # no gradient so far, anywhere
            return
        self._relink()
        places = self._exchanged.places
        assert self._roots is not None
        mine = places.zeros()
        take_gradients(
            places, mine, [place.parameter.grad for place in places], [0.0] * len(places), factor=factor, roots=self._roots
        )
        self._exchanged.average(mine, label="gradients")
        mine.div_(self._roots.masked_fill(self._roots == 0, 1.0))
        for place in places:
            beta = self._beta1(place.group, place.parameter)
            self._flat[place.start : place.stop].mul_(beta).add_(mine[place.start : place.stop], alpha=1 - beta)
        self._move()

    def _relink(self) -> None:
        assert self._exchanged is not None
        places = self._exchanged.places
        if not places.lie_in(self._flat, [self.state[place.parameter]["exp_avg"] for place in places]):
            self._link()

    def _move(self) -> None:
        """The parameters, by m / (sqrt(v) + eps)."""
        assert self._exchanged is not None
        for g, group in enumerate(self.param_groups):
            states = [(p.parameter, self.state[p.parameter]) for p in self._exchanged.places if p.group == g]
            rows = [(p, state["exp_avg"], state["exp_avg_sq"], state) for p, state in states]
            step_frozen(group, rows, eps=group["eps"], lr=group["lr"], weight_decay=group["weight_decay"])

    def _local_step(self, factor: float, *, message: bool) -> None:
        assert self._exchanged is not None
        assert self._alone is not None
        self._relink()
        places, alone = self._exchanged.places, self._alone
        betas = [self._beta1(place.group, place.parameter) for place in places]
        gradients = [place.parameter.grad for place in places]
        take_gradients(places, self._flat, gradients, betas, factor=factor, roots=self._roots)
        alone.add(self._flat, [(float(group["lr"]), float(group["weight_decay"])) for group in self.param_groups])
        if not message:
            for g, group in enumerate(self.param_groups):
                self._shift(g, self._flat, lr=group["lr"], weight_decay=group["weight_decay"], count=True)
            return
        still = not any(alone.rates)  # a rate of 0 throughout: nothing to add up, so the momenta themselves travel
        self._exchanged.average(self._flat if still else alone.sums, label="moves")
        alone.return_to_anchor(alone.masters(self.state))
        for g in range(len(self.param_groups)):
            self._shift(g, alone.sums, lr=0.0 if still else 1.0, weight_decay=1 - alone.decays[g], count=True)
        for place in () if still else places:
            if rate := alone.rates[place.group]:
                self._flat[place.start : place.stop] = alone.sums[place.start : place.stop] / rate
        alone.remember(alone.masters(self.state))
        alone.restart()

    def _shift(self, g: int, moves: Tensor, *, lr: float | Tensor, weight_decay: float, count: bool) -> None:
        assert self._exchanged is not None
        assert self._ones is not None
        rows = [
            (place.parameter, place.view(moves), place.view(self._ones), self.state[place.parameter])
            for place in self._exchanged.places
            if place.group == g
        ]
        step_frozen(self.param_groups[g], rows, eps=0.0, lr=lr, weight_decay=weight_decay, count=count)

    # ------------------------------------------------------------------------------------------------ phases and saving

    def _enter(self, *, errors: dict[str, Any] | None) -> None:
        self._synchronise_backward(self.schedule.kind(self.steps + 1) == EXACT)
        self._exchanged, self._alone = None, None
        moved = {p for p, state in self.state.items() if state}
        if not moved:
            return
        places = Places(self.param_groups, moved=moved)
        variances = [self.state[place.parameter]["exp_avg_sq"] for place in places]
        self._exchanged = Exchange(places, variances, codec=self.codec, communicator=self.communicator)
        if errors is not None:
            self._exchanged.errors.load_state_dict(errors)
        self._link()
        if self.phase == ALONE:
            self._alone = LocalSteps(places, groups=len(self.param_groups))
            self._alone.remember(self._alone.masters(self.state))

    def _communication_state(self) -> dict[str, Any]:
        errors = {} if self._exchanged is None else self._exchanged.errors.state_dict()
        state: dict[str, Any] = {"errors": errors, "updates": self.updates, "schedule": vars(self.schedule).copy(), "alone": {}}
        if self._alone is not None and self.schedule.kind(self.steps) == LOCAL:
            alone = self._alone
            own = {"sums": alone.sums, "means": self._flat, "anchor": alone.anchor}
            own["masters"] = alone.places.gather(alone.masters(self.state))
            where = {"rank": self.rank, "size": self.num_ranks}
            state["alone"] = {key: rows_of(flat, alone.places.layout, **where) for key, flat in own.items()}
            state["alone"] |= {"decays": list(alone.decays), "rates": list(alone.rates)}
        return state

    def _first_state(self) -> dict[str, Any]:
        return {"errors": {}, "updates": None, "schedule": vars(self.schedule), "alone": {}}

    def _load_communication(self, state: dict[str, Any]) -> None:
        if state["schedule"] != vars(self.schedule):
            raise ValueError(
                f"{type(self).__name__}: the state was made with the rounds of {state['schedule']}, this optimizer has "
                f"{vars(self.schedule)}; build it with the same"
            )
        if state["updates"] is None:  # of AdamW: its means are not corrected yet
            for group in self.param_groups:
                for own in (self.state[p] for p in group["params"] if self.state.get(p)):
                    for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                        own[key] = own[key] / (1 - float(beta) ** float(own["step"]))
        self.updates = self.steps if state["updates"] is None else int(state["updates"])
        self._enter(errors=state["errors"] or None)
        if state["alone"] and self._alone is not None:
            alone, own = self._alone, state["alone"]
            masters = alone.places.zeros()
            for flat, key in ((alone.sums, "sums"), (self._flat, "means"), (alone.anchor, "anchor"), (masters, "masters")):
                load_rows(own[key], alone.places.layout, flat, rank=self.rank, size=self.num_ranks)
            alone.decays, alone.rates = list(own["decays"]), list(own["rates"])
            with torch.no_grad():
                for place in alone.places:
                    self.state[place.parameter].get("master", place.parameter).copy_(place.view(masters))
                    place.parameter.copy_(place.view(masters))
