"""What the ranks tell each other before a step: sums over all of them, in one message.

| a backward to be reduced? | options, their square | gradients set by hand | sum of squares, not
finite | what got a gradient |
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.failure import DisagreementError
from pyops.ops.optimizers.grad_norm import CLIP_EPSILON
from pyops.protocols import ParamGroup
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.update.pipeline_axis import Stages
from pyops.zero.update.sharded_optimizer_state import Owned
from pyops.zero.update.tensor_parallel_axis import TensorParallel

__all__ = ["Told", "tell"]

PENDING, OPTIONS, OPTIONS_SQUARED, STRANGE, SQUARES, NONFINITE, USED = range(7)


@dataclass(frozen=True)
class Told:
    """The sums."""

    sums: list[float]
    device: torch.device

    @property
    def pending(self) -> bool:
        """Whether some rank has gradients, of backwards within no_sync(), that were not reduced."""
        return self.sums[PENDING] != 0

    @property
    def strange(self) -> bool:
        """Whether some rank has gradients that no backward has reduced."""
        return self.sums[STRANGE] != 0

    def unused(self, flats: Sequence[FlatParameters]) -> set[tuple[int, int]]:
        """The parameters, as (number of the buffer, number within), that got a gradient on no
        rank."""
        places = ((f, i) for f, flat in enumerate(flats) for i in range(len(flat.parameters)))
        return {place for place, used in zip(places, self.sums[USED:], strict=True) if not used}

    def norm(self, scale: Any) -> float:
        """Of all gradients, divided by the loss scale (None: 1); nan where it can't be told."""
        squares = self.sums[SQUARES]
        return (
            math.sqrt(squares) * (1.0 if scale is None else 1.0 / float(scale))
            if squares >= 0
            else math.nan
        )

    def factor(self, *, scale: Any, max_grad_norm: float | None) -> tuple[Tensor | None, bool]:
        """(what to multiply gradients by, whether to skip the step)."""
        factor = 1.0 if scale is None else 1.0 / float(scale)
        if max_grad_norm is not None:
            norm = self.norm(scale)
            if not math.isfinite(norm):
                return None, True
            factor *= min(1.0, max_grad_norm / (norm + CLIP_EPSILON))
        if self.sums[NONFINITE]:
            return None, True
        return (
            None if factor == 1.0 else torch.tensor(factor, dtype=torch.float64, device=self.device)
        ), False


def tell(
    owned: Owned,
    gradients: ShardedGradients,
    groups: Sequence[ParamGroup],
    *,
    communicator: Communicator | None,
    measures: bool,
    shared: bool,
    found_inf: Any,
    tensor_parallel: TensorParallel | None,
    stages: Stages | None,
    squares: Tensor | None = None,
    strange: int = 0,
) -> Told:
    """Tell and be told. A collective; DisagreementError, on every rank, where the ranks' options
    differ.

    measures: whether gradients are measured. shared: whether each rank measures its own part, or
    everything. squares: what it has measured already. strange: gradients that no backward has
    reduced.
    """
    device = owned.flats[0].device
    told = torch.zeros(USED + len(gradients.used), dtype=torch.float64, device=device)
    options = _options(groups)
    crc = float(zlib.crc32(repr(options).encode()) & 0xFFFF)
    told[PENDING] = float(any(bucket.whole is not None for bucket in gradients.buckets))
    told[STRANGE] = strange
    told[OPTIONS], told[OPTIONS_SQUARED] = crc, crc * crc
    if measures:
        told[SQUARES : NONFINITE + 1] = owned.squared_norm(device) if squares is None else squares
        if communicator is not None and not shared:
            told[SQUARES : NONFINITE + 1] /= communicator.size
    if found_inf is not None:
        told[NONFINITE] += float(found_inf)
    told[USED:] = torch.frombuffer(gradients.used, dtype=torch.uint8).to(device)
    ranks = 1 if communicator is None else communicator.size
    if communicator is not None:
        all_reduce(told, communicator=communicator, label="what to step")
    if tensor_parallel is not None:
        tensor_parallel.sum(told)
        ranks *= tensor_parallel.communicator.size
    sums: list[float] = told.tolist()
    if sums[OPTIONS_SQUARED] * ranks != sums[OPTIONS] ** 2:
        raise DisagreementError(
            "ZeroOptimizer: the ranks would step with different options; on this rank "
            f"{options}; set the same lr and other "
            "options on every rank"
        )
    if stages is not None:  # whose ranks have other parameters, in other groups
        some = told[[PENDING, STRANGE, SQUARES, NONFINITE]]
        stages.sum(some)
        sums[PENDING], sums[STRANGE], sums[SQUARES], sums[NONFINITE] = some.tolist()
    return Told(sums, device)


def _options(groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    return [
        {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in sorted(group.items())
            if key != "params"
        }
        for group in groups
    ]
