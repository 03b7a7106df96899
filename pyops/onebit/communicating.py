"""What optimizers that communicate share: ranks that agree before every step, and fail or skip it
together.

    step()   check -> norm of this rank's gradients -> one small message to each rank: phase, step,
             norm, finite?
                 a mistake, another phase: raises on every rank     |
                 a gradient that is not finite anywhere: skip       '-> exact round, or a compressed
                                                                    one

An exact round is the plain optimizer's step (AdamW's, say, by the same kernel) on gradients that
are reduced exactly: by `model` during backward, or here, all parameters in one all-reduce.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from pyops.comm.agreement import check_same, ranks_agree
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather, all_reduce
from pyops.comm.compression.codec import Codec
from pyops.comm.failure import DisagreementError
from pyops.mesh import ProcessGroupLike, resolve
from pyops.onebit.config import (
    CommunicatingConfig,
    OneBitConfig,
    check_communication,
    plain_options,
)
from pyops.onebit.steps.state_slots import StateSlots
from pyops.ops.optimizers.grad_norm import squared_norm
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.memory_layout import is_dense
from pyops.optim.one_bit import gradient_factor
from pyops.protocols import ParamGroup
from pyops.torch_private import disable_dynamo

__all__ = ["Communicating", "Verdict"]


class Verdict(NamedTuple):
    """What the ranks found together.

    Attributes:
        norm: Of the gradients, as if each rank's were the whole.
        finite: On every rank.
        extra: Rank 0's number, for decisions that rounding must not split.
    """

    norm: float
    finite: bool
    extra: float


def _plain(value: Any) -> Any:
    """An option as ranks compare it: 0 and 0.0 are one number, and a tensor is what it holds."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    known = isinstance(value, torch.Tensor) and value.numel() == 1
    return (
        float(value)
        if known or (isinstance(value, (int, float)) and not isinstance(value, bool))
        else str(value)
    )


class Communicating(FusedOptimizer):
    """The part of OneBitAdam, OneBitLAMB and ZeroOneAdam that speaks with other ranks; in front of
    the plain optimizer.

    Attributes:
        phase: In words.
        steps: Taken so far, without the skipped ones. The other attributes are the fields of its
            config.
    """

    phase: str = ""
    steps: int = 0
    codec: Codec
    group: ProcessGroupLike
    model: nn.Module | None
    reduction: str
    compat: str | None
    # their shards are other elements on every rank, and momenta are averaged element by element
    _steps_dtensors = False

    def _ranks_agree(self, config: object) -> AbstractContextManager[None]:
        """`ranks_agree` in the group of a config, which may be no config yet."""
        group = getattr(config, "group", None)
        resolve(group, type(self).__name__)
        return ranks_agree(group)

    def _configure(self, config: OneBitConfig) -> None:
        """Keep and check what the optimizer is told about communication."""
        self.codec = check_communication(config, type(self).__name__)
        self.group, self.model, self.reduction = config.group, config.model, config.reduction
        self.compat = config.compat

    def _agree_on_options(self, config: CommunicatingConfig) -> None:
        """Raises ValueError on every rank when the ranks built different optimizers."""
        shapes = [
            [(tuple(p.shape), str(p.dtype)) for p in group["params"]] for group in self.param_groups
        ]
        own = {
            "class": type(self).__name__,
            **plain_options(config),
            "parameters": str(shapes),
            "param_groups": str(self._options()),
        }
        check_same(own, group=self.group, who=type(self).__name__)

    def _options(self) -> list[dict[str, Any]]:
        """What decides how far a step goes, group by group, and must be the same on every rank."""
        whole = {"max_grad_norm": _plain(self.max_grad_norm), "master_weights": self.master_weights}
        return [
            whole
            | {"params": len(group["params"])}
            | {key: _plain(group.get(key)) for key in sorted(self.defaults)}
            for group in self.param_groups
        ]

    # --------------------------------------------------------------------------------------------
    # ranks

    @property
    def communicator(self) -> Communicator | None:
        """Of the group; None for one process."""
        group = resolve(self.group, type(self).__name__)
        return None if group is None else Communicator.of(group)

    def _leave(self, error: Exception) -> None:
        comm = self.communicator
        if comm is not None:
            comm.leave(error, device=self.device)
        raise error

    @property
    def num_ranks(self) -> int:
        comm = self.communicator
        return 1 if comm is None else comm.size

    @property
    def rank(self) -> int:
        comm = self.communicator
        return 0 if comm is None else comm.rank

    @property
    def device(self) -> torch.device:
        """Of the first parameter; all lie there."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    def _synchronise_backward(self, wanted: bool) -> None:
        """Let `model` reduce gradients in the next backward, or not."""
        if self.model is not None:
            self.model.require_backward_grad_sync = wanted  # type: ignore[assignment]

    def _exchange(
        self, error: Exception | None, squares: Sequence[float], *, extra: float = 0.0
    ) -> Verdict:
        """Compare with every rank what is about to happen; raises on all when a rank has an error
        or does something else."""
        doing = (float(self._phases().index(self.phase)), float(self.steps))
        fingerprint = [
            float(error is not None),
            *doing,
            *squares,
            extra,
            float(zlib.crc32(repr(self._options()).encode())),
        ]
        comm = self.communicator
        if comm is None or comm.size == 1:
            rows = [fingerprint]
        else:
            mine = torch.tensor([fingerprint], dtype=torch.float64, device=self.device)
            rows = all_gather(
                mine, algorithm="two_shot", communicator=comm, label="what to do"
            ).tolist()
        if error is not None:
            raise error
        who = type(self).__name__
        if bad := [rank for rank, row in enumerate(rows) if row[0]]:
            raise RuntimeError(
                f"{who}: rank {bad[0]} could not step, its error says why; no rank has "
                "changed anything"
            )
        if any(tuple(row[1:3]) != doing for row in rows):
            stand = [
                f"rank {r} after step {int(row[2])} in {self._phases()[int(row[1])]!r}"
                for r, row in enumerate(rows)
            ]
            raise DisagreementError(
                f"{who}: the ranks are in different phases: {', '.join(stand)}; load the "
                "same checkpoint on every rank",
                ranks=[r for r, row in enumerate(rows) if tuple(row[1:3]) != doing],
            )
        if disagreeing := [rank for rank, row in enumerate(rows) if row[6] != rows[0][6]]:
            raise DisagreementError(
                f"{who}: rank {self.rank} would step with {self._options()}, but the "
                f"options of ranks {disagreeing} are not "
                "those of rank 0; set the same lr and other options, and add the same "
                "groups, on every rank",
                ranks=disagreeing,
            )
        total, count = sum(row[3] for row in rows), sum(row[4] for row in rows)
        scale = 1 / len(rows) if self.reduction == "mean" else len(rows)
        return Verdict(
            math.sqrt(total * scale) if math.isfinite(total) else math.nan, count == 0, rows[0][5]
        )

    @abstractmethod
    def _phases(self) -> tuple[str, ...]:
        """The phases in their order."""

    # --------------------------------------------------------------------------------------------
    # gradients

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As torch.optim; ValueError once gradients are no longer reduced exactly, or for several
        devices."""
        who = type(self).__name__
        if self.phase and self.phase != self._phases()[0]:
            raise ValueError(
                f"{who}: a parameter can't be added in phase {self.phase!r}: it has no "
                "variance to keep, and the other "
                "ranks' messages have no place for it; add it before the switch, or "
                "start a new optimizer"
            )
        super().add_param_group(param_group)
        added = [*self.param_groups[-1]["params"]]
        if elsewhere := [p for p in added if p.device != self.device]:
            self.param_groups.pop()
            raise ValueError(
                f"{who}: parameters on {self.device} and {elsewhere[0].device}: one "
                "message carries them all; build an "
                "optimizer for each device"
            )

    def _inverse_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    def _measure(self) -> tuple[Exception | None, list[float]]:
        """What is wrong with a gradient here, if anything; (sum of squares, unscaled; number of
        non-finite elements)."""
        try:
            for group in self.param_groups:
                self._check_group(group)
                self._check_rows(
                    group, [i for i, p in enumerate(group["params"]) if p.grad is not None]
                )
        except (TypeError, ValueError) as error:
            return error, [0.0, 0.0]
        found = [
            p.grad.detach()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not found:
            return None, [0.0, 0.0]
        total, bad = squared_norm([g if is_dense(g) else g.contiguous() for g in found]).tolist()
        found_inf = getattr(self, "found_inf", None)
        bad += 0.0 if found_inf is None else float(found_inf)
        return None, [total * self._inverse_scale() ** 2, bad]

    def _reduce_gradients(self) -> None:
        """Every .grad becomes the exact mean (or sum) over the ranks; a parameter without one here
        may get one."""
        if self.num_ranks == 1:
            return
        params = [p for group in self.param_groups for p in group["params"]]
        slots = StateSlots(self.param_groups, moved=set(params))
        flat = torch.zeros(
            slots.layout.numel + len(params), dtype=torch.float32, device=self.device
        )
        gradients, present = flat[: slots.layout.numel], flat[slots.layout.numel :]
        for i, slot in enumerate(slots):
            if slot.parameter.grad is not None:
                slot.view(gradients).copy_(slot.parameter.grad)
                present[i] = 1.0
        # Each rank's own scale, so that ranks whose scalers differ still add up the same thing.
        gradients.mul_(self._inverse_scale())
        group = resolve(self.group, type(self).__name__)
        all_reduce(flat, op=self.reduction, group=group, label="gradients")
        gradients.div_(self._inverse_scale())
        for slot, anywhere in zip(slots, present.tolist(), strict=True):
            if anywhere:
                if slot.parameter.grad is None:
                    slot.parameter.grad = torch.empty_like(slot.parameter)
                slot.parameter.grad.copy_(slot.view(gradients))

    def _clip_factor(self, verdict: Verdict) -> float:
        """By what to multiply this rank's gradient: unscaled, as one of a mean over ranks, clipped
        by the common norm."""
        return gradient_factor(
            verdict.norm,
            max_grad_norm=self.max_grad_norm,
            grad_scale=getattr(self, "grad_scale", None),
            summed=self.num_ranks if self.reduction == "sum" else 1,
        )

    def _clear_gradients(self) -> None:
        if self.zeroes_gradients:
            torch._foreach_zero_(
                [
                    p.grad
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            )

    # --------------------------------------------------------------------------------------------
    # stepping

    @disable_dynamo
    def _step(self) -> None:
        error, squares = self._measure()
        verdict = self._exchange(error, squares, extra=self._observe())
        if not verdict.finite:
            self._measured["grad_norm"] = torch.tensor(math.nan, device=self.device)
            self._clear_gradients()
            return
        if self._take(verdict):
            self.steps += 1
            self._advance(verdict)

    def _observe(self) -> float:
        """A number of this rank for `Verdict.extra`."""
        return 0.0

    @abstractmethod
    def _take(self, verdict: Verdict) -> bool:
        """Take the step; False when it turned out that it had to be skipped."""

    @abstractmethod
    def _advance(self, verdict: Verdict) -> None:
        """Another phase or round, if it is time; called after each step."""

    def _exact_step(self) -> bool:
        """The plain optimizer's step on exactly reduced gradients."""
        self.found_inf = None
        super()._step()
        return bool(self.grad_norm is not None and self.grad_norm.isfinite())
