"""What a coordinator is told: SandblasterConfig."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SandblasterConfig"]


@dataclass(frozen=True)
class SandblasterConfig:
    """How a batch is cut, and when iterations end.

    Raises:
        ValueError, TypeError: For values out of range, naming the field.
    """

    portions: int
    """Parts of the batch, each with a gradient of its own; many more than workers."""
    portions_per_message: int = 1
    """Portions that a worker adds up before it sends their gradient, a power of two: fewer
    messages, and more to compute anew when a worker is lost."""
    backups: bool = True
    """Whether the last portions are computed by free workers, too."""
    history_size: int = 10
    """Pairs of steps and differences of gradients that are kept."""
    lr: float = 1.0
    """Of the first trial of each line search."""
    max_eval: int = 25
    """Evaluations of a line search at most."""
    tolerance_grad: float = 1e-7
    """The run ends where no component of the gradient is larger."""
    tolerance_change: float = 1e-9
    """The run ends where neither a parameter nor the loss changes more."""

    def __post_init__(self) -> None:
        for name in ("portions", "portions_per_message", "history_size", "max_eval"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; give a whole number, 1 or more")
            if value < 1:
                raise ValueError(f"{name} is {value}; give a whole number, 1 or more")
        run = self.portions_per_message
        if run & (run - 1):
            raise ValueError(
                f"portions_per_message is {run}; give a power of two, such as "
                f"{1 << (run.bit_length() - 1)}"
            )
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}; give more than 0, such as 1")
        for name in ("tolerance_grad", "tolerance_change"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")

    @property
    def level(self) -> int:
        """Of the node of the tree of portions that a message has the sum of."""
        return self.portions_per_message.bit_length() - 1

    @property
    def units(self) -> int:
        """Messages of a pass over the batch."""
        return -(-self.portions // self.portions_per_message)

    def portions_of(self, unit: int) -> range:
        """The portions of a message.

        Args:
            unit: Which message.
        """
        first = unit * self.portions_per_message
        return range(first, min(first + self.portions_per_message, self.portions))
