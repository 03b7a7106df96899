"""Options: what is asked for besides the model and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyops.plan.costs.rank_memory import ADAM
from pyops.plan.layout import CODECS, RECOMPUTE, Layout
from pyops.plan.shapes import PlanError

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What is asked for besides the model and the cluster."""

    batch: int = 0
    """Rows of a step; 0: one micro-batch for each device, and four for each rank of a pipeline."""
    precision: str = "bf16"
    """ "fp32", "bf16" or "fp16"."""
    optimizer_bytes: float = ADAM
    """Bytes of an element's optimizer states; 8: Adam's."""
    memory_part: float = 0.92
    """Which part of a device's memory may be used."""
    recompute: tuple[str, ...] = RECOMPUTE
    """What may be computed again, of `pyops.plan.layout.RECOMPUTE`."""
    codecs: tuple[str, ...] = ()
    """What gradients of whole copies may travel as beside what they are, of
    `pyops.plan.layout.CODECS`: they round, so one is taken where it is named alone."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout` that must have a value: {"tp": 2}."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            PlanError: Naming field, value and fix.
        """
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 0:
            raise PlanError(f"batch is {self.batch!r}; give a whole number of rows, 0 or more")
        if self.precision not in ("fp32", "bf16", "fp16"):
            why = ": pyops has no products in fp8" if self.precision == "fp8" else ""
            raise PlanError(f"precision is {self.precision!r}{why}; choose one of fp32, bf16, fp16")
        if not 0 < self.memory_part <= 1:
            raise PlanError(
                f"memory_part is {self.memory_part!r}; give a number above 0, up to 1, such as 0.92"
            )
        if strange := [each for each in self.recompute if each not in RECOMPUTE]:
            raise PlanError(f"recompute has {strange[0]!r}; choose among {', '.join(RECOMPUTE)}")
        if strange := [each for each in self.codecs if each not in CODECS]:
            raise PlanError(f"codecs has {strange[0]!r}; choose among {', '.join(CODECS)}")
        if not self.optimizer_bytes >= 0:
            raise PlanError(
                f"optimizer_bytes is {self.optimizer_bytes!r}; give 8 for Adam, 4 for momentum, 0"
            )
        if "ep" in self.fixed:
            raise PlanError(
                f"fixed has ep={self.fixed['ep']!r}: pyops has no layer of experts and no expert "
                "parallelism; leave ep out"
            )
        if strange := sorted(set(self.fixed) - set(Layout.__dataclass_fields__)):
            raise PlanError(
                f"fixed has {strange[0]!r}, which a layout has not; it has "
                f"{', '.join(Layout.__dataclass_fields__)}"
            )
