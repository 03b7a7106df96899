"""What a run of Sandblaster L-BFGS is told: SandblasterConfig."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SandblasterConfig"]


@dataclass(frozen=True)
class SandblasterConfig:
    """How a batch is handed out, and how its loss is minimized."""

    portions: int = 64
    """Portions of the batch; several for each worker, so that fast ones do more of them."""
    run: int = 1
    """Portions that a worker takes and sends at a time, a power of 2."""
    backups: bool = True
    """Whether a worker that has nothing left to do computes what others have not finished, so that
    one that is slow or lost holds up nobody; the first answer counts."""
    history_size: int = 10
    """Pairs of steps and differences of gradients that the shards keep."""
    lr: float = 1.0
    """The first trial of a line search; in the first iteration it is at most 1 / |g|_1."""
    trials: int = 25
    """Evaluations of a line search, after its first."""
    tolerance_grad: float = 1e-7
    """The run ends where no component of the gradient is larger."""
    tolerance_change: float = 1e-9
    """The run ends where neither a parameter nor the loss changes more in an iteration."""
    patience: float = 60.0
    """Seconds without any progress after which shards or workers count as lost."""

    def __post_init__(self) -> None:
        for name in ("portions", "run", "history_size", "trials"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; give a whole number, 1 or more")
        if self.run & (self.run - 1):
            raise ValueError(f"run is {self.run}; give a power of 2: sums are added in pairs")
        for name in ("lr", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name} is {value!r}; give a number above 0")
        for name in ("tolerance_grad", "tolerance_change"):
            value = getattr(self, name)
            if isinstance(value, bool) or not value >= 0:
                raise ValueError(f"{name} is {value!r}; give a number, 0 or more")

    @property
    def height(self) -> int:
        """The level of a run in the tree of portions."""
        return self.run.bit_length() - 1

    @property
    def runs(self) -> int:
        """How many runs the portions make."""
        return -(-self.portions // self.run)
