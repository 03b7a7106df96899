"""1-bit Adam: AdamW until the variance is stable, then momenta of which one bit per element
travels.

    warm-up        gradients --exact mean--> AdamW                         phase "warmup"
    the switch     v <- v / (1 - beta2^T), m <- m / (1 - beta1^T)          steps stay as long
    compressed     w = beta1 w + (1 - beta1) g / (sqrt(v) + eps)           phase "compressed"
                   w --1 bit, error feedback--> w on all ranks             v stays
                   p = p (1 - lr wd) - lr w

Tang et al., arXiv:2102.02888, algorithm 1; there the bias correction is left out, and m = (sqrt(v)
+ eps) w travels. v is kept and the same on all ranks, so both mean the same; but a block's one
scale fits w, whose elements are of one size, and with m an element of small v would be moved by
scale / sqrt(v).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.onebit.config import LocalOptions, OneBitConfig, checked_config, with_limit
from pyops.onebit.sharded import Phases, phases_of
from pyops.onebit.steps.deepspeed_step import step_uncorrected
from pyops.onebit.steps.frozen_variance_step import inverse_roots, step_frozen
from pyops.onebit.steps.state_slots import StateSlots
from pyops.onebit.two_phases import TwoPhases
from pyops.optim.adam import AdamW

__all__ = ["OneBitAdam"]


class OneBitAdam(TwoPhases, AdamW):
    """1-bit Adam. Each rank gives the gradients of its own part of the batch; step() averages what
    is needed.

    In the compressed phase an element whose variance is 0 only decays; a parameter that never had a
    gradient stays as it is. A gradient that is inf or nan on any rank skips the step on every rank
    and changes nothing; `grad_norm` is nan then. state_dict() is torch's and has the key
    "communication" beside it: the phase, and this rank's error buffers.

    Args:
        params: one tensor per layer, or `FlatBuffer.parameter`; in groups.
        lr, betas, eps, weight_decay: as AdamW's.
        config: options of communication and of the two phases.
        options: max_grad_norm, zero_grad, master_weights: as AdamW's.

    Raises:
        ValueError, TypeError: on every rank alike, for arguments that make no sense or differ
            between ranks, and for parameters added after the switch.
        DisagreementError: when ranks are in different phases.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        config: OneBitConfig | None = None,
        **options: Unpack[LocalOptions],
    ) -> None:
        with self._ranks_agree(config):
            config = checked_config(type(self).__name__, config, OneBitConfig, options)
            AdamW.__init__(self, params, lr, betas, eps, weight_decay, **with_limit(options))
            self._begin(config, beta2=float(betas[1]))
        self._agree_on_options(config)
        self._start()

    @classmethod
    def over_shards(cls, arguments: Mapping[str, Any]) -> Phases:
        """Its phases, for a ZeroOptimizer that shares its states out and communicates in its
        place."""
        if cls is not OneBitAdam:
            raise ValueError(
                f"{cls.__name__} can't be shared out over ranks; OneBitAdam can, or use "
                "it without ZeRO, with "
                "pyops.data_parallel.DataParallel"
            )
        return phases_of(cls.__name__, arguments)

    def _uncorrected_step(self) -> bool:
        return step_uncorrected(self)

    def _weigh(self, slots: StateSlots) -> Tensor | None:
        self._ones: Tensor | None = None
        if not self.precondition:
            return None
        self._ones = torch.ones_like(self._flat)
        eps = [float(self.param_groups[slot.group]["eps"]) for slot in slots]
        return inverse_roots(
            slots, [self.state[slot.parameter]["exp_avg_sq"] for slot in slots], eps
        )

    def _apply(self, slots: StateSlots, betas: list[float], before: Tensor | None) -> None:
        for g, group in enumerate(self.param_groups):
            rows = []
            for slot in (slot for slot in slots if slot.group == g):
                state = self.state[slot.parameter]
                variance = state["exp_avg_sq"] if self._ones is None else slot.view(self._ones)
                rows.append((slot.parameter, state["exp_avg"], variance, state))
            eps = group["eps"] if self._ones is None else 0.0
            step_frozen(group, rows, eps=eps, lr=group["lr"], weight_decay=group["weight_decay"])
