"""ObserveConfig: what a run notes of itself, and when it gives up: [observe]."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.config.config_error import require

__all__ = ["TRACKERS", "ObserveConfig"]

TRACKERS = ("wandb", "mlflow")


@dataclass(frozen=True)
class ObserveConfig:
    """What a run notes of itself, and when it gives up.

    Attributes:
        flight_record: Whether the collectives of two and more ranks are noted in
            runs/NAME/flight, for `pyops flight`.
        patience: Seconds after which a collective that has not ended is told of, with who is
            waited for and where; shorter than the timeout of the ranks.
        stragglers: Whether ranks that take longer for their own work than others are named.
        compare_every: Steps after which replicas are compared bit for bit; 0: never.
        spike: Median absolute deviations over the median of the last 200 losses beyond which a
            step's batch is kept in runs/NAME/spikes, for `pyops replay`; 0: never.
        most_spikes: Batches that are kept, at most.
        page: Whether a run that ends writes run.html.
        trackers: Services that get the metrics too: "wandb", "mlflow".
        max_idle_restarts: Restarts in a row without a new checkpoint after which the run ends; 0:
            any number.
    """

    flight_record: bool = True
    patience: float = 60.0
    stragglers: bool = True
    compare_every: int = 0
    spike: float = 6.0
    most_spikes: int = 10
    page: bool = True
    trackers: tuple[str, ...] = ()
    max_idle_restarts: int = 3

    def __post_init__(self) -> None:
        require(self, "more than 0", ("patience",), lambda v: v > 0)
        require(
            self,
            "0 or more",
            ("compare_every", "spike", "most_spikes", "max_idle_restarts"),
            lambda v: v >= 0,
        )
        known = f"a list of {', '.join(TRACKERS)}"
        require(self, known, ("trackers",), lambda v: set(v) <= set(TRACKERS))
