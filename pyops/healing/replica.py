"""HealingDataParallel: data parallelism that goes on where a replica is lost.

Parameters and states of the optimizer are whole on each replica, so those that are behind take them
from the one that is furthest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.data_parallel import DataParallel
from pyops.healing.peer_state import send_state
from pyops.healing.quorum import QuorumConfig
from pyops.healing.repeated_step import Compute, HasState, HealingReplica, Part, check_not_cut

__all__ = ["HealingDataParallel"]


class HealingDataParallel(HealingReplica):
    """Data parallelism over the replicas that live, each one process on Gloo, in place of
    DataParallel and of the process group.

    A step is applied by all replicas that go on or by none. Where one dies, the others leave the
    group, agree in the store on who lives, and repeat the step, of which the batch is divided anew.
    Where some had applied it already, the others take their state: parameters, buffers, states of
    the optimizer and of `extra`, in buckets. So does a replica that joins, between two steps.

    Args:
        model: The same on every replica up to the values.
        optimizer: Of its parameters, whole on each replica: any but a ZeroOptimizer, for which
            there is HealingZero.
        store: A store of torch.distributed that all replicas reach and none of them holds.
        config: How many replicas are enough, and how long they wait.
        extra: By name, what else has a state, the same on every replica: schedules, scalers.
        steps: How many have been taken, for a run that begins at a checkpoint.

    Attributes:
        steps: How many have been taken.
        quorum: Who is there.

    Raises:
        ValueError: There is a process group; an optimizer that keeps a part of its states alone; a
            model that is not whole here. Nothing is changed.
        CommunicationError: In `step`: too few replicas live, one that lives does not come, or the
            store is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: dist.Store,
        *,
        config: QuorumConfig | None = None,
        extra: Mapping[str, HasState] | None = None,
        steps: int = 0,
    ) -> None:
        _check_whole(model, optimizer)
        self.optimizer = optimizer
        self._parallel: DataParallel | None = None
        super().__init__(model, store, config=config, extra=extra, steps=steps)

    def _take(self, compute: Compute, part: Part) -> tuple[Tensor, int]:
        assert self._parallel is not None
        self.optimizer.zero_grad()
        return compute(self._parallel, part)

    def _apply(self, loss: Tensor, *, rows: float) -> None:
        # Gradients are summed: each is divided by the rows of all replicas that are there.
        (loss / rows).backward()
        self.optimizer.step()

    def _let_go(self) -> None:
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None

    def _begin(self, group: dist.ProcessGroup, steps: list[int]) -> None:
        """Who is behind takes the state of the replica that is furthest; of rank 0's at a tie."""
        furthest = max(steps)
        if min(steps) < furthest:
            state = send_state(self._state(), source=steps.index(furthest), group=group)
            if self.steps < furthest:
                self._load(state)
        self._parallel = DataParallel(self.model, group=group, reduction="sum")

    def _signature(self) -> list[tuple[Any, ...]]:
        return [*self._tensors(), ("optimizer", type(self.optimizer).__name__)]

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "extra": {name: each.state_dict() for name, each in self.extra.items()},
            "steps": self.steps,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, each in self.extra.items():
            each.load_state_dict(state["extra"][name])
        self.steps = state["steps"]


def _check_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """ValueError where a replica's death would take what nobody else has."""
    if hasattr(optimizer, "communicator"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which communicates by itself, or has "
            "states that are spread over the ranks: those of a lost replica can't be healed; use "
            "one that is whole on each replica, such as pyops.optim.AdamW, HealingZero for states "
            "that are spread, or restart from a checkpoint"
        )
    own = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in own:
                raise ValueError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(p.shape)} "
                    "that is not the model's, which a replica that joins would not get; make the "
                    "optimizer of model.parameters()"
                )
    check_not_cut(model)
