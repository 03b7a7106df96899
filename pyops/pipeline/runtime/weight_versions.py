"""WeightVersions: which weights the micro-batches of a stage meet, where steps are taken while
other micro-batches are in flight.

    stage 0 of 3, pipedream    0F0   0F1   0F2   0B0   0U0   0F3   0B1   0U1   0F4   0B2   ...
    newest                      w0    w0    w0    w0    w1    w1    w1    w2    w2    w2
    met                         w0    w0    w0    w0          w1    w0          w2    w0
    kept                        w0    w0    w0    w0   w0-1  w0-1  w0-1  w0-2  w0-2  w1-2

A version is the memory of the stage's parameters, and a parameter is the same object in all of
them: what is switched before an action is its `.data`. So names, hooks, gradients and optimizer
know of no versions, and autograd, which keeps a parameter or a view of its memory, finds in
backward what its forward had. Memory is copied before a step if a later action needs what is there,
and let go after the last action that does.

Buffers, such as the running statistics of a batch norm, have one version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.schedule import Schedule
from pyops.torch_private import preserve_version_counter

__all__ = ["CorrectedWeights", "StashedWeights", "WeightVersions"]


class WeightVersions:
    """One version, which steps change in place: forward and backward meet whatever is newest
    then."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.max_kept = 1

    @property
    def num_kept(self) -> int:
        """How many versions there are in memory now, the newest among them."""
        return 1

    def begin(self, *, synchronous: bool) -> None:
        """A call of `Pipeline.step` begins.

        Args:
            synchronous: No micro-batch is in flight in any of its optimizer steps.
        """

    def end(self) -> None:
        """The call is over, or has failed: the newest version is in place."""

    @contextlib.contextmanager
    def weights_for(self, action: Action) -> Iterator[None]:
        """Within, the parameters are as an F, B, I, W or R meets them."""
        yield

    @contextlib.contextmanager
    def stepping(self, action: Action) -> Iterator[None]:
        """Within, the parameters are the newest version, and may be changed to the next one:
        `action` is that U."""
        with _unseen_by_autograd(self.parameters):
            yield


class StashedWeights(WeightVersions):
    """Every micro-batch meets the version that the schedule says (PipeDream's weight stashing); a
    version is kept until its last use."""

    def __init__(self, parameters: Sequence[Tensor], schedule: Schedule, stage: int) -> None:
        super().__init__(parameters)
        order = [
            action for action in schedule.ranks[schedule.rank_of[stage]] if action.stage == stage
        ]
        self._position = {action: position for position, action in enumerate(order)}
        self._version = {action: schedule.version(action) for action in order if action.kind != "U"}
        self._last_use = {
            version: self._position[action] for action, version in self._version.items()
        }
        self._newest = self._here = 0
        self._memory: dict[int, list[Tensor]] = {}
        self._synchronous = False

    @property
    def num_kept(self) -> int:
        return max(1, len(self._memory))

    def begin(self, *, synchronous: bool) -> None:
        self._synchronous = synchronous
        self._newest = self._here = 0
        self._memory = {0: [p.data for p in self.parameters]}

    def end(self) -> None:
        if self._memory:
            self._switch(self._newest)
        self._memory = {}

    @contextlib.contextmanager
    def weights_for(self, action: Action) -> Iterator[None]:
        if self._synchronous:
            yield
            return
        version = self._version[action]
        self._switch(version)
        yield
        if version < self._newest and self._last_use[version] == self._position[action]:
            # The parameters hold on to this memory until the next action switches them, and nothing
            # is allocated in between.
            del self._memory[version]

    @contextlib.contextmanager
    def stepping(self, action: Action) -> Iterator[None]:
        self._switch(self._newest)
        old = self._memory[self._newest]
        if not self._synchronous and self._last_use.get(self._newest, -1) > self._position[action]:
            self._memory[self._newest + 1] = [t.clone() for t in old]
        else:
            self._memory[self._newest + 1] = self._memory.pop(self._newest)
        self.max_kept = max(self.max_kept, self.num_kept)
        self._newest += 1
        self._switch(self._newest)
        with _unseen_by_autograd(self.parameters):
            yield
        self._memory[self._newest] = [p.data for p in self.parameters]

    def _switch(self, version: int) -> None:
        if version == self._here:
            return
        for p, memory in zip(self.parameters, self._memory[version], strict=True):
            p.data = memory
        self._here = version
        # The autocast cache is keyed by the parameter object, whose memory is another one now.
        torch.clear_autocast_cache()


class CorrectedWeights(WeightVersions):
    """One version, and in backward an estimate of the one that forward met: w - age * drift
    (PipeMare's T2).

    drift: the average of the steps' changes, each counting `gamma` times as much as the one after
    it. age: of the micro-batch, in steps between its forward and its backward. gamma: decay ** (1 /
    delay), delay being the stage's age on average.
    """

    def __init__(
        self, parameters: Sequence[Tensor], schedule: Schedule, stage: int, *, decay: float
    ) -> None:
        super().__init__(parameters)
        delay = schedule.delay(stage)
        self.gamma = decay ** (1 / delay) if delay else 0.0
        order = [
            action for action in schedule.ranks[schedule.rank_of[stage]] if action.stage == stage
        ]
        self._age = {
            action: schedule.version(action) - schedule.version(Action(stage, "F", action.number))
            for action in order
            if action.kind in "BIRW"
        }
        self.corrects = any(self._age.values())
        self.drift: list[Tensor] = []
        self._newest: list[Tensor] = []
        self._synchronous = False
        if self.corrects:
            self.drift = [
                torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                for p in parameters
            ]

    @torch.no_grad()
    def begin(self, *, synchronous: bool) -> None:
        self._synchronous = synchronous
        if self.corrects:
            self._newest = [p.detach().clone() for p in self.parameters]

    def end(self) -> None:
        if self._newest:
            self._restore()
        self._newest = []

    @contextlib.contextmanager
    def weights_for(self, action: Action) -> Iterator[None]:
        age = 0 if self._synchronous else self._age.get(action, 0)
        if not age:
            yield
            return
        with _unseen_by_autograd(self.parameters), torch.no_grad():
            torch._foreach_add_(self.parameters, self.drift, alpha=-age)
        yield
        self._restore()

    @contextlib.contextmanager
    def stepping(self, action: Action) -> Iterator[None]:
        with _unseen_by_autograd(self.parameters):
            yield
        if self.corrects:
            with torch.no_grad():
                torch._foreach_sub_(self._newest, self.parameters)
                torch._foreach_mul_(self.drift, self.gamma)
                torch._foreach_add_(self.drift, self._newest, alpha=self.gamma - 1)
                torch._foreach_copy_(self._newest, self.parameters)

    @torch.no_grad()
    def _restore(self) -> None:
        with _unseen_by_autograd(self.parameters):
            torch._foreach_copy_(self.parameters, self._newest)


@contextlib.contextmanager
def _unseen_by_autograd(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within, parameters may be changed in place though graphs of micro-batches in flight have
    them: autograd's version counters stay as they are.

    Sound because a schedule says which weights a backward meets: others than its forward's where it
    means to.
    """
    with preserve_version_counter(tuple(parameters)):
        yield
    torch.clear_autocast_cache()
