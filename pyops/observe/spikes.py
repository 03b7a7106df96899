"""A step whose loss stands out, and the batch that it was taken on, kept for a second look.

    loss > median + deviations * MAD of the last steps   ->   spikes/step-00000123/
                                                              about.json  rank0.safetensors ...

MAD is the median absolute deviation, which single spikes hardly move. The losses are means over all
ranks, so all ranks see a spike in the same step, and each keeps its own rows.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["SpikeDetector", "load_batch", "save_batch"]

SMALLEST = 1e-3  # of the median: a MAD below this says that losses do not move


@dataclass
class SpikeDetector:
    """Says which losses stand out among the last ones."""

    deviations: float = 6.0
    """A loss over the median by more than so many MADs is a spike."""
    window: int = 200
    """Losses that are compared with."""
    least: int = 20
    """Losses before the first that can be a spike."""

    def __post_init__(self) -> None:
        if not (self.deviations > 0 and 0 < self.least <= self.window):
            raise ValueError(
                f"deviations is {self.deviations}, window {self.window}, least {self.least}; give "
                "deviations above 0, and 1 <= least <= window"
            )
        self._losses: deque[float] = deque(maxlen=self.window)

    def update(self, loss: float | None) -> str:
        """What there is to say about a step's loss, "" where it is as the others.

        A spike does not count among those that later losses are compared with.

        Args:
            loss: Of the step; None, NaN and infinity are spikes.
        """
        enough = len(self._losses) >= self.least
        if loss is None or not math.isfinite(loss):
            return "the loss is not finite" if enough else ""
        if enough:
            median = statistics.median(self._losses)
            mad = statistics.median(abs(each - median) for each in self._losses)
            mad = max(mad, SMALLEST * abs(median))
            if loss > median + self.deviations * mad:
                return (
                    f"the loss is {loss:.4g}, {(loss - median) / mad:.3g} median absolute "
                    f"deviations above the median {median:.4g} of the last {len(self._losses)} "
                    "steps"
                )
        self._losses.append(loss)
        return ""


def save_batch(
    folder: Path, batch: Mapping[str, Any], *, rank: int, about: Mapping[str, Any]
) -> Path:
    """Keep the rows that a rank had in a step.

    Args:
        folder: Of the run.
        batch: {name: tensor}; other values are left out.
        rank: Of this process; the first one writes `about`, too.
        about: What is said of the step; "step" is its number.

    Returns:
        The folder of the step: spikes/step-00000123.
    """
    from safetensors.torch import save_file

    place = folder / "spikes" / f"step-{about['step']:08}"
    place.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: each.detach().cpu().contiguous()
        for name, each in batch.items()
        if isinstance(each, torch.Tensor)
    }
    save_file(tensors, str(place / f"rank{rank}.safetensors"))
    if rank == 0:
        (place / "about.json").write_text(json.dumps(dict(about), indent=2))
    return place


def load_batch(place: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The rows of all ranks of a step, in rank order, and what was said of it.

    Args:
        place: The folder of the step.

    Raises:
        ValueError: There is none.
    """
    from safetensors.torch import load_file

    where = Path(place)
    paths = sorted(where.glob("rank*.safetensors"), key=lambda p: int(p.stem[4:]))
    if not paths:
        raise ValueError(
            f"{place} has no rank*.safetensors; name a folder of a run's spikes/, such as "
            "runs/small/spikes/step-00000123"
        )
    parts = [load_file(str(path)) for path in paths]
    # Ranks that share a model have the same rows; they are taken once.
    whole = [part for i, part in enumerate(parts) if not any(_same(part, p) for p in parts[:i])]
    try:
        about: dict[str, Any] = json.loads((where / "about.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{where / 'about.json'} can't be read: {error}") from None
    return {name: torch.cat([part[name] for part in whole]) for name in parts[0]}, about


def _same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
