"""1-bit Adam: AdamW until the variance is stable, then momenta of which one bit per element
travels.

    warm-up        gradients --exact mean--> AdamW                                       phase "warmup"
    the switch     v <- v / (1 - beta2^T), m <- m / (1 - beta1^T)                        the step stays as long as it was
    compressed     w = beta1 w + (1 - beta1) g / (sqrt(v) + eps) --1 bit, error feedback--> w on all ranks
                   p = p (1 - lr wd) - lr w                                              phase "compressed"; v stays

Tang et al., arXiv:2102.02888, algorithm 1; there the bias correction is left out, and m = (sqrt(v)
+ eps) w travels. v is kept and the same on all ranks, so both mean the same; but a block's one
scale fits w, whose elements are of one size, and with m an element of small v would be moved by
scale / sqrt(v).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.compression.codec import Codec
from pyops.onebit.communicating import on_all_ranks
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

    params, lr, betas, eps, weight_decay: as AdamW's. One tensor per layer, or
    `FlatBuffer.parameter`; in groups. warmup_steps: exact steps before the switch, or "auto": until
    the second moment is stable (see Warmup).
    group: the ranks; None: all, or one alone where torch.distributed is not running. Every rank
    steps alike.
    model: the DistributedDataParallel or DataParallel that reduces gradients during backward in the
    warm-up; the optimizer
        sets its require_backward_grad_sync to False at the switch. None: nobody reduces, step() does it.
    op: "mean", or "sum" where the ranks' losses are parts of a sum: the gradient is then the sum of
    theirs.
    codec: how momenta travel; OneBit() by default.
    precondition: whether w travels, as above, or m, as in the paper.
    frozen_beta2: the decay of the mean of squared gradients that the switch keeps; by default 1 - 2
    / warmup_steps (0.995 with
        "auto"), if that is more than beta2: a variance that never changes again should not be that of the last few batches.
        With frozen_beta2=beta2 the step is continuous to rounding.
    compat: "deepspeed" steps as DeepSpeed 0.19.6 does: no bias correction in either phase, hence
    longer first steps, m travels,
        with one scale for the whole of it. Its first call, which throws a gradient away, is not imitated.
    max_grad_norm: clip by the same factor on every rank. With local gradients the norm is that of
    the ranks' root mean square. zero_grad, master_weights: as AdamW's. total_steps: of the run; a
    warm-up that is not shorter is warned about.

    In the compressed phase an element whose variance is 0 only decays; a parameter that never had a
    gradient stays as it is. A gradient that is inf or nan on any rank skips the step on every rank
    and changes nothing; `grad_norm` is nan then. state_dict() is torch's and has the key
    "communication" beside it: the phase, and this rank's error buffers.

    Raises, on every rank alike: ValueError and TypeError for arguments that make no sense or differ
    between ranks, and for parameters added after the switch; DisagreementError when ranks are in
    different phases.
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
                self,
                params,
                lr,
                betas,
                eps,
                weight_decay,
                zero_grad=zero_grad,
                master_weights=master_weights,
                max_grad_norm=float("inf") if max_grad_norm is None else max_grad_norm,
            )
            self._configure(group=group, model=model, op=op, codec=codec, compat=compat)
            self._begin(
                warmup_steps=warmup_steps,
                beta2=float(betas[1]),
                total_steps=total_steps,
                precondition=precondition,
                frozen_beta2=frozen_beta2,
            )
        self._agree_on_options(warmup_steps, max_grad_norm, precondition, frozen_beta2)
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
