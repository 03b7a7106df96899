"""0/1 Adam: momenta of one bit in each step, a few exact rounds for the variance, and after its
freeze steps without messages.

    phase "variance"   s = mean of squares of this rank's own gradients     every step, no message
                       exact: v = c * the ranks' mean of s                  at steps whose distance
                                                                            doubles, and the last
                       compressed: w = beta1 w + (1 - beta1) g / (sqrt(v) + eps)     every step
                                   p = p (1 - lr wd) - lr w
    phase "local"      each rank moves by its own w                         v stays
                       message: the mean of these moves, one bit            at steps whose distance
                                                                            doubles, to a cap

When v becomes v', w and the errors go over to the new unit: times (sqrt(v) + eps) / (sqrt(v') +
eps), 0 where v is 0. What a message leaves out is a way that parameters did not go, w times the sum
of learning rates since the message before: where that sum changes, errors do inversely.

Lu et al., arXiv:2202.06009, algorithms 1 and 2. There v is made of the gradients of the exact
rounds alone. In a run of 2,000 steps these are a dozen, most of them from the first steps, whose
gradients are the largest: v stays too large, every step too short. Here each step contributes (see
variance.py), and the exact rounds can be fewer. Otherwise than there too: means are bias-corrected;
what travels is w, not g, as in OneBitAdam; decay is of the common parameters (see local_steps.py).
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.comm.compression.codec import Codec
from pyops.comm.compression.floats import BF16
from pyops.comm.compression.one_bit import OneBit
from pyops.onebit.adam import OneBitAdam
from pyops.onebit.communicating import Verdict
from pyops.onebit.config import (
    CommunicatingConfig,
    LocalOptions,
    OneBitConfig,
    ZeroOneConfig,
    checked_config,
)
from pyops.onebit.steps.frozen_variance_step import inverse_roots, step_frozen, take_gradients
from pyops.onebit.steps.local_steps import LocalSteps, load_rows, rows_of
from pyops.onebit.steps.momentum_exchange import MomentumExchange
from pyops.onebit.steps.round_schedule import EXACT, LOCAL, Rounds, RoundSchedule
from pyops.onebit.steps.state_slots import StateSlots
from pyops.onebit.steps.variance import SharedVariance
from pyops.optim.one_bit import logger

__all__ = ["ZeroOneAdam"]

VARIANCE, ALONE = "variance", "local"
ONE_BIT_NOISE = (
    1 - 2 / math.pi
)  # what a sign and a mean size leave out of the squared norm of normal numbers


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam, with a variance to which every step contributes.

    `rounds(2000)` counts the messages of a run of 2,000 steps, `bytes_ratio(2000)` says how much
    they send. A parameter whose first gradient comes between two exact rounds begins to move at the
    next one, at the latest at the freeze. exp_avg in the state is w. A state_dict of AdamW goes on
    with its v until the next exact round. Within a local interval the ranks' parameters differ.
    state_dict() holds this rank's; loaded on another number of ranks, all go on from the mean. A
    small message in every step, of a few bytes, finds what is not finite, and the common norm.

    Args:
        params, lr, betas, eps, weight_decay, options: as OneBitAdam's.
        config: options of communication and of its rounds; its `model` reduces nothing, from the
            first step on. None: ZeroOneConfig().

    Raises:
        ValueError, TypeError, DisagreementError: as OneBitAdam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        config: ZeroOneConfig | None = None,  # type: ignore[override]
        **options: Unpack[LocalOptions],
    ) -> None:
        config = ZeroOneConfig() if config is None else config
        with self._ranks_agree(config):
            config = checked_config(type(self).__name__, config, ZeroOneConfig, options)
            steps = config.warmup_steps
            if steps == "auto":
                steps = max(1, config.total_steps // 5) if config.total_steps else 400
            # Of a bad number of steps the base class says what is wrong.
            freeze = max(1, steps) if isinstance(steps, int) else 1
            self.schedule = RoundSchedule(
                freeze,
                config.var_update_scaler,
                config.local_step_scaler,
                config.local_step_clipper,
            )
        shared = {each.name: getattr(config, each.name) for each in fields(CommunicatingConfig)}
        phases = OneBitConfig(**{**shared, "warmup_steps": steps}, frozen_beta2=0.0)
        super().__init__(params, lr, betas, eps, weight_decay, config=phases, **options)
        codec = config.variance_codec
        self.variance_codec: Codec = BF16() if codec is None else codec
        self._agree_on_options(config)
        self.phase = VARIANCE
        self._lengths: list[
            float
        ] = []  # of each group: what the last message's w was multiplied by
        self._variance: SharedVariance | None = SharedVariance(self.param_groups)
        self._alone: LocalSteps | None = None

    def rounds(self, steps: int) -> Rounds:
        """How many of the first `steps` steps have an exact round besides the compressed one, this
        alone, or no message."""
        return self.schedule.rounds(steps)

    def bytes_ratio(self, steps: int) -> float:
        """What the first `steps` steps send, in parts of what an fp32 all-reduce of the gradients
        in each would."""
        variance = SharedVariance(self.param_groups)
        numel = variance.layout.numel
        payload, exact = (
            self.codec.payload_bytes(numel),
            self.variance_codec.payload_bytes(numel) + 4 * variance.exact_numel(),
        )
        return self.schedule.bytes_ratio(
            steps, payload=payload / (4 * numel), exact_payload=exact / (4 * numel)
        )

    def _phases(self) -> tuple[str, ...]:
        return VARIANCE, ALONE

    def _observe(self) -> float:
        return 0.0

    def _synchronise_backward(self, wanted: bool) -> None:
        super()._synchronise_backward(False)  # each rank's own gradient is always needed

    # --------------------------------------------------------------------------------------------
    # a step

    def _take(self, verdict: Verdict) -> bool:
        self._measured["grad_norm"] = torch.tensor(verdict.norm, device=self.device)
        kind, factor = self.schedule.kind(self.steps + 1), self._clip_factor(verdict)
        if self._variance is not None:
            self._variance = self._variance.extended(self.param_groups)
            self._variance.take(factor)
            if kind == EXACT:
                self._exact_round(self._variance, factor)
        if self._exchanged is not None:  # None: no gradient so far, anywhere
            self._momentum_step(factor, message=kind != LOCAL)
        self._clear_gradients()
        return True

    def _advance(self, verdict: Verdict) -> None:
        if self.steps == self.schedule.var_freeze_step:
            self.phase, self._variance = ALONE, None
            if self.rank == 0:
                logger.info(
                    "%s: the variance is kept as it is after step %d",
                    type(self).__name__,
                    self.steps,
                )

    def _exact_round(self, variance: SharedVariance, factor: float) -> None:
        """Another v, and everything in its units."""
        squares, seen = variance.exchange(
            factor,
            codec=self.variance_codec,
            communicator=self.communicator,
            noise=ONE_BIT_NOISE if isinstance(self.codec, OneBit) else 0.0,
        )
        found = [slot for slot, anywhere in zip(variance.slots, seen, strict=True) if anywhere]
        if not found:
            return
        for slot in found:
            self._complete(
                self.param_groups[slot.group], slot.parameter, self.state[slot.parameter]
            )
        before = self._exchanged
        if before is None or len(before.slots) != len(found):
            self._enter(errors=None)
            if before is not None and self._exchanged is not None:
                self._exchanged.adopt(before)
        assert self._exchanged is not None
        self._relink()
        old, slots = self._roots, self._exchanged.slots
        for slot in found:
            self.state[slot.parameter]["exp_avg_sq"].copy_(slot.view(squares))
        variances = [self.state[slot.parameter]["exp_avg_sq"] for slot in slots]
        self._roots = inverse_roots(
            slots, variances, [float(self.param_groups[slot.group]["eps"]) for slot in slots]
        )
        assert old is not None
        ratio = torch.where(old == 0, 0.0, self._roots / old)
        self._flat.mul_(ratio)
        self._exchanged.rescale(ratio)
        self._exchanged.find_dead(variances)

    def _relink(self) -> None:
        assert self._exchanged is not None
        slots = self._exchanged.slots
        if not slots.lie_in(self._flat, [self.state[slot.parameter]["exp_avg"] for slot in slots]):
            self._link()

    def _momentum_step(self, factor: float, *, message: bool) -> None:
        """Move by this rank's momentum, or, at the end of an interval, by the ranks' mean of what
        they moved by in it."""
        assert self._exchanged is not None
        assert self._alone is not None
        self._relink()
        slots, alone = self._exchanged.slots, self._alone
        betas = self._first_betas(slots)
        gradients = [slot.parameter.grad for slot in slots]
        take_gradients(slots, self._flat, gradients, betas, factor=factor, roots=self._roots)
        rates = [(float(group["lr"]), float(group["weight_decay"])) for group in self.param_groups]
        if message and not alone.begun:  # an interval of one step
            self._measure_errors_by([rate for rate, _ in rates])
            self._exchanged.average(self._flat, label="momentum")
            self._shift(rates)
        elif message:
            self._end_interval(alone, rates)
        else:
            if not alone.begun:
                alone.remember(alone.masters(self.state))
            alone.add(self._flat, rates)
            self._shift(rates)

    def _end_interval(self, alone: LocalSteps, rates: list[tuple[float, float]]) -> None:
        assert self._exchanged is not None
        alone.add(self._flat, rates)
        for slot in alone.slots:
            if rate := alone.rates[
                slot.group
            ]:  # 0 throughout: nothing to add up, so the momentum itself travels
                torch.div(
                    alone.sums[slot.start : slot.stop],
                    rate,
                    out=self._flat[slot.start : slot.stop],
                )
        self._measure_errors_by(alone.rates)
        self._exchanged.average(self._flat, label="moves")
        alone.return_to_anchor(alone.masters(self.state))
        self._shift(
            [
                (rate, (1 - keep) / rate if rate else 0.0)
                for rate, keep in zip(alone.rates, alone.decays, strict=True)
            ]
        )
        alone.restart()

    def _measure_errors_by(self, lengths: list[float]) -> None:
        """The next message is of w times `lengths`, one for each group. Where that is 0 nothing
        moves, and errors stay."""
        assert self._exchanged is not None
        known = [*self._lengths, *[0.0] * (len(lengths) - len(self._lengths))]
        self._exchanged.rescale_groups(
            [old / new if new else 1.0 for old, new in zip(known, lengths, strict=True)]
        )
        self._lengths = [new or old for old, new in zip(known, lengths, strict=True)]

    def _shift(self, rates: list[tuple[float, float]]) -> None:
        """Parameters by w. rates: (lr, weight decay) of each group."""
        assert self._exchanged is not None
        assert self._ones is not None
        for g, (lr, weight_decay) in enumerate(rates):
            rows = [
                (
                    slot.parameter,
                    slot.view(self._flat),
                    slot.view(self._ones),
                    self.state[slot.parameter],
                )
                for slot in self._exchanged.slots
                if slot.group == g
            ]
            step_frozen(self.param_groups[g], rows, eps=0.0, lr=lr, weight_decay=weight_decay)

    # --------------------------------------------------------------------------------------------
    # phases and saving

    def _enter(self, *, errors: dict[str, Any] | None) -> None:
        self._synchronise_backward(False)
        self._exchanged, self._alone = None, None
        moved = {p for p, state in self.state.items() if state}
        if not moved:
            return
        slots = StateSlots(self.param_groups, moved=moved)
        variances = [self.state[slot.parameter]["exp_avg_sq"] for slot in slots]
        self._exchanged = MomentumExchange(
            slots, variances, codec=self.codec, communicator=self.communicator
        )
        if errors is not None:
            self._exchanged.errors.load_state_dict(errors)
        self._link()
        self._alone = LocalSteps(slots, groups=len(self.param_groups))

    def _communication_state(self) -> dict[str, Any]:
        errors = {} if self._exchanged is None else self._exchanged.errors.state_dict()
        state: dict[str, Any] = {
            "errors": errors,
            "lengths": list(self._lengths),
            "variance": {},
            "alone": {},
        }
        state["schedule"] = vars(self.schedule).copy()
        where = {"rank": self.rank, "size": self.num_ranks}
        if self._variance is not None:
            self._variance = self._variance.extended(self.param_groups)
            state["variance"] = self._variance.state_dict(**where)
        if self._alone is not None and self.schedule.kind(self.steps) == LOCAL:
            alone = self._alone
            own = {"sums": alone.sums, "means": self._flat, "anchor": alone.anchor}
            own["masters"] = alone.slots.gather(alone.masters(self.state))
            state["alone"] = {
                key: rows_of(flat, alone.slots.layout, **where) for key, flat in own.items()
            }
            state["alone"] |= {"decays": list(alone.decays), "rates": list(alone.rates)}
        return state

    def _first_state(self) -> dict[str, Any]:
        return {
            "errors": {},
            "lengths": [],
            "schedule": vars(self.schedule),
            "variance": None,
            "alone": {},
        }

    def _load_communication(self, state: dict[str, Any]) -> None:
        if state["schedule"] != vars(self.schedule):
            raise ValueError(
                f"{type(self).__name__}: the state was made with the rounds of "
                f"{state['schedule']}, this optimizer has "
                f"{vars(self.schedule)}; build it with the same"
            )
        if state["variance"] is None:
            self._take_over_adam()
        self._variance = SharedVariance(self.param_groups) if self.phase == VARIANCE else None
        if self._variance is not None and state["variance"]:
            self._variance.load_state_dict(state["variance"], rank=self.rank, size=self.num_ranks)
        self._enter(errors=state["errors"] or None)
        self._lengths = list(state["lengths"])
        if state["alone"] and self._alone is not None:
            self._load_interval(self._alone, state["alone"])

    def _take_over_adam(self) -> None:
        """AdamW's means are not corrected yet, and its first one is of gradients."""
        if self.steps >= self.schedule.var_freeze_step:
            self.phase = ALONE
        for group in self.param_groups:
            for own in (self.state[p] for p in group["params"] if self.state.get(p)):
                for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                    own[key] = own[key] / (1 - float(beta) ** float(own["step"]))
                unit = own["exp_avg_sq"].sqrt() + float(group["eps"])
                own["exp_avg"] = torch.where(own["exp_avg_sq"] == 0, 0.0, own["exp_avg"] / unit)

    def _load_interval(self, alone: LocalSteps, own: dict[str, Any]) -> None:
        masters = alone.slots.zeros()
        for flat, key in (
            (alone.sums, "sums"),
            (self._flat, "means"),
            (alone.anchor, "anchor"),
            (masters, "masters"),
        ):
            load_rows(own[key], alone.slots.layout, flat, rank=self.rank, size=self.num_ranks)
        alone.decays, alone.rates = list(own["decays"]), list(own["rates"])
        with torch.no_grad():
            for slot in alone.slots:
                self.state[slot.parameter].get("master", slot.parameter).copy_(slot.view(masters))
                slot.parameter.copy_(slot.view(masters))
