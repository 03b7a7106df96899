"""Gradual pruning: a little more goes every so many steps, and what is left makes up for it (Zhu
and Gupta, 2017).

    schedule = CubicSchedule(final=0.9, begin=100, every=20, times=40)
    with gradual(model, optimizer, schedule) as pruner:
        for batch in batches:
            loss(model(batch)).backward()
            optimizer.step()
            pruner.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import ranks_agree
from pyops.given_numbers import check_whole
from pyops.mesh import ProcessGroupLike
from pyops.pruning.masks import Masks, unpack_bits
from pyops.pruning.packed import masks_from_state, masks_state
from pyops.pruning.ranking.holdings import Holdings
from pyops.pruning.ranking.rule import Rule, masks_of_holdings, scores_of, zero_pruned
from pyops.pruning.ranking.structures import Structure
from pyops.pruning.training.holding import Hold, hold
from pyops.pruning.training.schedule import CubicSchedule
from pyops.pruning.training.states import check_optimizer_kind

__all__ = ["Gradual", "gradual"]

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def gradual(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: CubicSchedule,
    *,
    scope: str | Structure = "layer",
    only: Sequence[str] | None = None,
    least: float = 0.0,
    regrow: bool = False,
    group: ProcessGroupLike = None,
) -> Gradual:
    """Prune by magnitude while training, along a schedule.

    Args:
        model: This rank's part of it.
        optimizer: What trains it; as for `hold`.
        schedule: How much is pruned after which step.
        scope, only, least: As of `magnitude`.
        regrow: False: what is pruned stays 0. True: a pruned weight keeps the value it had beside
            the model, and comes back when it is among the largest again, as in the paper; its
            moments begin anew.
        group: The ranks that have the model together; see `pyops.mesh.resolve`.

    Returns:
        What is told of each step: a context manager that holds the masks until it is left.

    Raises:
        ValueError, TypeError: As `magnitude` and `hold`; and for regrow with 16-bit weights, whose
            float32 masters would not come back.
    """
    return Gradual(model, optimizer, schedule, Rule(scope, only, least), regrow=regrow, group=group)


class Gradual:
    """See `gradual`.

    Attributes:
        schedule: The schedule.
        steps: How many steps it was told of.
        masks: Those in force; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: CubicSchedule,
        rule: Rule,
        *,
        regrow: bool = False,
        group: ProcessGroupLike = None,
    ) -> None:
        self.schedule, self.steps, self.masks = schedule, 0, None
        self._model, self._optimizer, self._rule = model, optimizer, rule
        self._regrow, self._group = regrow, group
        self._hold: Hold | None = None
        self._gone: dict[str, Tensor] = {}  # values of pruned weights, of each holding
        if not isinstance(schedule, CubicSchedule):
            raise TypeError(f"schedule is a {type(schedule).__name__}; give a CubicSchedule")
        check_optimizer_kind(optimizer)
        rule.agree(schedule.final, group=group)
        holdings = self._holdings()  # what is asked for is there
        with ranks_agree(group):
            narrow = [each.name for each in holdings if each.values.dtype in SIXTEEN_BITS]
            if regrow and narrow:
                raise ValueError(
                    f"{narrow[0]} is of 16 bits, and its float32 master would not come back; use "
                    "regrow=False"
                )
        if schedule.due(0):
            self._prune(schedule.at(0))

    masks: Masks | None

    @property
    def sparsity(self) -> float:
        """Of the schedule, after the steps so far; 0 before the first mask."""
        return 0.0 if self.masks is None else self.schedule.at(self.steps)

    def step(self) -> None:
        """Tell of a step of the optimizer; at some of them, prune. Collective."""
        self.steps += 1
        if self.schedule.due(self.steps):
            self._prune(self.schedule.at(self.steps))

    def close(self) -> None:
        """Let go of model and optimizer; weights stay as they are. A second time it does
        nothing."""
        if self._hold is not None:
            self._hold.close()
            self._hold = None
        if self.masks is not None:
            self.masks.release()

    def __enter__(self) -> Gradual:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The steps so far and the masks, whole, for a checkpoint. Collective.

        Raises:
            ValueError: With regrow=True, once something is pruned: what it keeps beside the model
                is this layout's.
        """
        if self._gone:
            raise ValueError(
                "gradual(regrow=True) keeps pruned values beside the model, which no checkpoint "
                "has; use regrow=False to save and resume"
            )
        masks = None if self.masks is None else masks_state(self.masks, group=self._group)
        return {"steps": self.steps, "masks": masks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any layout. Load the model and the optimizer
        before. Collective.

        Raises:
            ValueError: On every rank, for a state of something else, and masks of another model.
        """
        with ranks_agree(self._group):
            if not isinstance(state, Mapping) or not {"steps", "masks"} <= state.keys():
                raise ValueError(
                    "the state of a gradual pruning has steps and masks; give what its state_dict "
                    f"returned, not {type(state).__name__} of {sorted(map(str, state or ()))}"
                )
            check_whole("the state's steps", state["steps"])
        if state["masks"] is not None:
            self._take(masks_from_state(self._model, state["masks"], group=self._group))
        self.steps = int(state["steps"])

    def _holdings(self) -> Holdings:
        return Holdings(
            self._model, only=self._rule.only, optimizer=self._optimizer, group=self._group
        )

    @torch.no_grad()
    def _prune(self, sparsity: float) -> None:
        holdings = self._holdings()
        before = self._alive(holdings)
        if self._regrow and before is not None:
            for each in holdings:
                each.values[~before[each.name]] = self._gone[each.name]
        scores = scores_of(holdings, None)
        within = None if self._regrow else before
        alive = self._rule.select(holdings, scores, sparsity, within=within)
        if self._regrow:
            self._gone = {e.name: e.values[~alive[e.name]].clone() for e in holdings}
        self._take(masks_of_holdings(holdings, alive))
        zero_pruned(holdings, alive)

    def _alive(self, holdings: Holdings) -> dict[str, Tensor] | None:
        if self.masks is None:
            return None
        return {
            each.name: unpack_bits(
                self.masks[each.name].bits.to(each.values.device),
                each.values.numel(),
                start=each.start,
            )
            for each in holdings
        }

    def _take(self, masks: Mapping[str, Any]) -> None:
        if self.masks is not None:
            self.masks.update(masks)
            return
        with ranks_agree(self._group):
            Masks.checked(self._model, masks)
        self.masks = Masks(self._model, masks)
        try:
            self._hold = hold(self.masks, self._optimizer)
        except BaseException:
            self.masks.release()
            self.masks = None
            raise
