"""ProfiledCosts: a pipeline of layers that were measured, of any module."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.pipeline import Profile, balance, schedule, simulate
from pyops.plan.layout import SEVERAL_STAGES, Layout
from pyops.plan.shapes import PlanError

__all__ = ["ProfiledCosts"]


@dataclass(frozen=True)
class ProfiledCosts:
    """The time and memory of a pipeline whose layers were measured, in place of formulas."""

    profile: Profile
    """As `pyops.pipeline.profile` measured it, for one micro-batch."""
    latency: float = 0.0
    """Seconds until what was sent arrives."""
    bandwidth: float = float("inf")
    """Bytes a second of each channel."""

    def step(self, layout: Layout) -> tuple[float, float]:
        """(seconds of a step without messages of dp, bytes of the fullest rank).

        Args:
            layout: With its pp, schedule and micro-batches; tp must be 1.

        Raises:
            PlanError: The layout cuts layers, which the profile has whole, or there are fewer
                layers than stages.
        """
        layout.validate()
        if layout.tp > 1:
            raise PlanError(
                f"tp is {layout.tp}, but the profile has whole layers; set it to 1, or profile the "
                "layers of a rank"
            )
        if layout.num_stages > len(self.profile):
            raise PlanError(
                f"the profile has {len(self.profile)} layers, fewer than {layout.num_stages} "
                "stages; take fewer, or profile smaller layers"
            )
        if layout.pp == 1:
            seconds = layout.num_microbatches * sum(x.time for x in self.profile.layers)
            count = len(self.profile)
            return seconds, self.profile.weights(0, count) + self.profile.kept(0, count)
        several = {"v": layout.stages_per_rank} if layout.schedule in SEVERAL_STAGES else {}
        made = schedule(
            layout.schedule,
            num_stages=layout.pp,
            num_microbatches=layout.num_microbatches,
            **several,
        ).with_recompute("always" if layout.recompute == "block" else "never")
        bounds = balance(self.profile, num_stages=made.num_stages)
        costs = self.profile.costs(
            bounds, split=made.splits_backward, latency=self.latency, bandwidth=self.bandwidth
        )
        timeline = simulate(made, costs)
        return timeline.makespan, max(timeline.memory)
