"""Statistics that are summed over all ranks before each optimizer step, packed into one tensor.

| pending | options, options squared | set by hand | sum of squares, not finite | used ... |

The host has to know all but the two about the size of the gradients before anything is changed: it
flushes gradients that are pending, raises on all ranks alike where their options differ or where a
gradient was set by hand, and leaves parameters alone that no rank used. On a CPU everything travels
in one message. On an accelerator a message there makes the host wait for all work that was given to
the device, so these numbers, which the host has made, travel between the hosts, and the host waits
for the other hosts alone; the size of the gradients stays on the device. Where no backend of the
groups carries CPU tensors (`init_process_group("nccl")` rather than "cpu:gloo,cuda:nccl"), there is
one message on the device and the host waits for it at every step: checked later, an error would
come after the parameters had changed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyops.comm.buckets.grad_norm import clip_factor
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import DisagreementError
from pyops.ops.optimizers.grad_norm import CLIP_EPSILON
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.layout.parameters import FlatParameters

__all__ = ["DeviceScaling", "StatsAxes", "StepStats", "reduce_step_stats"]

ParamGroup = dict[str, Any]
PENDING, OPTIONS, OPTIONS_SQUARED, SET_BY_HAND, SQUARES, NOT_FINITE, USED = range(7)
MEASURED = slice(SQUARES, NOT_FINITE + 1)
# What pipeline stages have in common. They hold other parameters, in other groups.
OVER_STAGES = [PENDING, SET_BY_HAND, SQUARES, NOT_FINITE]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StatsAxes:
    """The ranks over which the statistics are summed; None for an axis of one rank."""

    data: Communicator | None
    tensor: Communicator | None = None
    pipeline: Communicator | None = None

    def communicators(self) -> list[Communicator]:
        """Those of several ranks, in the order in which sums go over them."""
        axes = (self.data, self.tensor, self.pipeline)
        return [axis for axis in axes if axis is not None]


class DeviceScaling(NamedTuple):
    """What is done to the gradients of a step, decided on the device: the host does not know."""

    factor: Tensor
    """float64 scalar to multiply gradients by."""
    found_inf: Tensor
    """float32 scalar, not 0 where the step is to change nothing."""
    norm: Tensor
    """float32 scalar: the norm of the gradients, without the loss scale."""


@dataclass(frozen=True)
class StepStats:
    """The sums over all ranks.

    Attributes:
        sums: What the host has; its entries MEASURED are of no meaning.
        measured: float64 [2], the sum of squares and the number of elements that are not finite: on
            the device of the gradients, or on the CPU where the host has them already.
        device: Of the gradients.
        on_host: Whether the host has `measured`, so that reading it waits for nothing.
    """

    sums: list[float]
    measured: Tensor
    device: torch.device
    on_host: bool

    @property
    def pending(self) -> bool:
        """Whether some rank has gradients, of backwards within no_sync(), that were not reduced."""
        return self.sums[PENDING] != 0

    @property
    def set_by_hand(self) -> bool:
        """Whether some rank has gradients that no backward has reduced."""
        return self.sums[SET_BY_HAND] != 0

    def unused(self, flats: Sequence[FlatParameters]) -> set[tuple[int, int]]:
        """The parameters, as (number of the buffer, number within), without a gradient on any
        rank."""
        places = ((f, i) for f, flat in enumerate(flats) for i in range(len(flat.parameters)))
        return {place for place, used in zip(places, self.sums[USED:], strict=True) if not used}

    def norm(self, scale: Any) -> float:
        """The norm of all gradients divided by the loss scale (None: 1); nan where it is unknown.

        Waits for the device where the measurement is there.
        """
        squares = float(self.measured[0])
        return (
            math.sqrt(squares) * (1.0 if scale is None else 1.0 / float(scale))
            if squares >= 0
            else math.nan
        )

    def factor(self, *, scale: Any, max_grad_norm: float | None) -> tuple[Tensor | None, bool]:
        """(what to multiply gradients by, whether to skip the step), decided on the host.

        Waits for the device where the measurement is there.
        """
        factor = 1.0 if scale is None else 1.0 / float(scale)
        if max_grad_norm is not None:
            norm = self.norm(scale)
            if not math.isfinite(norm):
                return None, True
            factor *= min(1.0, max_grad_norm / (norm + CLIP_EPSILON))
        if float(self.measured[1]):
            return None, True
        return (
            None if factor == 1.0 else torch.tensor(factor, dtype=torch.float64, device=self.device)
        ), False

    def scaling_on_device(self, *, scale: Any, max_grad_norm: float | None) -> DeviceScaling:
        """As `norm` and `factor`, with the same bits, without waiting for the device.

        Args:
            scale: The loss scale, a tensor or a number; None for 1.
            max_grad_norm: None for no clipping.
        """
        squares, not_finite = self.measured.to(self.device).unbind()
        factor = torch.ones_like(squares)
        if scale is not None:
            loss_scale = torch.as_tensor(scale, dtype=torch.float64).to(self.device)
            factor = loss_scale.reshape(()).reciprocal()
        norm = squares.sqrt() * factor
        skip = not_finite != 0
        if max_grad_norm is not None:
            skip = skip | ~norm.isfinite()
            factor = factor * clip_factor(norm, max_grad_norm)
        return DeviceScaling(factor, skip.float(), norm.float())


def reduce_step_stats(
    gradients: ShardedGradients,
    groups: Sequence[ParamGroup],
    *,
    axes: StatsAxes,
    measured: Tensor | None,
    found_inf: Any,
    set_by_hand: int = 0,
) -> StepStats:
    """Sum the statistics of this rank over all ranks. Collective.

    Args:
        gradients: Those of the step.
        groups: The optimizer's parameter groups, whose options all ranks must have alike.
        axes: The ranks.
        measured: float64 [2] on the gradients' device: the sum of squares of what this rank counts,
            and the number of elements that are not finite. None where nothing was measured.
        found_inf: What a gradient scaler found on this rank, a tensor or a number; None without.
        set_by_hand: The number of gradients that no backward has reduced.

    Raises:
        DisagreementError: The ranks' options differ; on every rank.
    """
    device = gradients.flats[0].device
    communicators = axes.communicators()
    cpu_backends = all(_carries_cpu_tensors(each) for each in communicators)
    own = torch.zeros(2, dtype=torch.float64, device=device) if measured is None else measured
    if found_inf is not None:
        own[1] += torch.as_tensor(found_inf).to(device, torch.float64).reshape(())
    # The message of the device holds the measurement as well; see the page's head.
    message = torch.zeros(
        USED + len(gradients.used), dtype=torch.float64, device=CPU if cpu_backends else device
    )
    together = not cpu_backends or _is_host(device)
    options = _options(groups) if communicators else []
    checksum = float(zlib.crc32(repr(options).encode()) & 0xFFFF)
    message[PENDING] = float(gradients.pending)
    message[SET_BY_HAND] = set_by_hand
    message[OPTIONS], message[OPTIONS_SQUARED] = checksum, checksum * checksum
    message[USED:] = torch.frombuffer(gradients.used, dtype=torch.uint8).to(message.device)
    if together:
        message[MEASURED] = own
    ranks = 1
    for axis, label in (
        (axes.data, "what to step"),
        (axes.tensor, "what to step, over tensor-parallel ranks"),
    ):
        if axis is not None:
            all_reduce(message, communicator=axis, label=label)
            ranks *= axis.size
    sums: list[float] = message.tolist()
    if sums[OPTIONS_SQUARED] * ranks != sums[OPTIONS] ** 2:
        raise DisagreementError(
            "ZeroOptimizer: the ranks would step with different options; on this rank "
            f"{options}; set the same lr and other "
            "options on every rank"
        )
    if axes.pipeline is not None:
        of_stages = message[OVER_STAGES]
        all_reduce(of_stages, communicator=axes.pipeline, label="what to step, over the stages")
        for place, value in zip(OVER_STAGES, of_stages.tolist(), strict=True):
            sums[place] = value
    if together or (measured is None and found_inf is None):
        known = torch.tensor(sums[MEASURED], dtype=torch.float64, device=CPU)
        return StepStats(sums, known, device, on_host=True)
    for axis in communicators:
        all_reduce(own, communicator=axis, label="the norm of the gradients")
    return StepStats(sums, own, device, on_host=False)


def _is_host(device: torch.device) -> bool:
    """Whether the host can read tensors of the device without waiting for it."""
    return device.type == "cpu"


def _carries_cpu_tensors(communicator: Communicator) -> bool:
    try:
        communicator.backend(CPU)
    except RuntimeError:
        return False
    return True


def _options(groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """The options of the groups, as plain values."""
    return [
        {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in sorted(group.items())
            if key != "params"
        }
        for group in groups
    ]
