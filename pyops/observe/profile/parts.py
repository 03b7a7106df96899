"""A step in parts that sum up to it: each module's forward and backward, waits, the optimizer.

    step    |-- embedding --|-- block 0 ... --|-- loss --|-- block 0 backward ... --|-- optimizer
    marks   ^               ^                 ^          ^                          ^

A mark is set where a module begins or ends. The time since the last mark belongs to the innermost
part that is open, so nothing is counted twice and nothing is left out. In backward a module begins
when the gradient of its output is there, and ends when that of its input is. On a GPU marks are
events of its stream.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from pyops import flight_record
from pyops.torch_private import after_backward, in_backward

__all__ = ["OUTSIDE", "Part", "Parts", "Span", "by_phase"]

OUTSIDE = "outside of modules"


@dataclass(frozen=True)
class Part:
    """Something that a step does."""

    name: str
    """Of the module, "" for the model itself; or "optimizer", "waiting", OUTSIDE."""
    phase: str
    """"forward", "backward", or "" for what is neither."""


@dataclass(frozen=True)
class Span:
    """A part, from one mark to the next."""

    part: Part
    begun: float
    """Seconds since the step began."""
    seconds: float


REST = Part(OUTSIDE, "")


class Parts:
    """Cuts steps into parts.

    Args:
        model: Whose modules are told apart.
        device: Whose time counts.

    Attributes:
        spans: Of the last step, in their order.
        seconds: Of the last step.
        began_at: When it began, in nanoseconds of time.time_ns.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._cuda = device.type == "cuda"
        self._device = device
        self._open: list[Part] = []
        self._marks: list[tuple[Any, Part]] = []
        self._in_pass = False
        self._hooks: list[Any] = []
        self.spans: list[Span] = []
        self.seconds = 0.0
        self.began_at = 0

    @property
    def current(self) -> Part:
        """The innermost part that is open."""
        return self._open[-1] if self._open else REST

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within the block, which is one step, parts are told apart."""
        self._marks, self._open, self._hooks = [], [], []
        handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self._begin(Part("optimizer", ""))),
            register_optimizer_step_post_hook(lambda *_: self._end(Part("optimizer", ""))),
        ]
        record = flight_record.active()
        if record is not None:
            record.on_wait = self._waits
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self.began_at = time.time_ns()
        first = self._now()
        try:
            yield
        finally:
            last = self._now()
            if record is not None:
                record.on_wait = None
            for handle in [*handles, *self._hooks]:
                handle.remove()
        self._hooks = []
        self._count(first, last)

    def totals(self) -> dict[Part, float]:
        """Seconds of each part in the last step; they sum up to it."""
        found: dict[Part, float] = defaultdict(float)
        for span in self.spans:
            found[span.part] += span.seconds
        return dict(found)

    # marks

    def _now(self) -> Any:
        if self._cuda:
            return torch.cuda.current_stream(self._device).record_event(
                torch.cuda.Event(enable_timing=True)
            )
        return time.perf_counter()

    def _mark(self) -> None:
        """What has run since the last mark belongs to the part that is open until now."""
        self._marks.append((self._now(), self.current))

    def _begin(self, part: Part) -> None:
        self._mark()
        self._open.append(part)

    def _end(self, part: Part) -> None:
        self._mark()
        if part not in self._open:
            return
        at = len(self._open) - 1 - self._open[::-1].index(part)
        # What lies within ends with it. What is not within has begun on the same gradient: the
        # module before this one, of whose output this one's input is the same tensor.
        later = [each for each in self._open[at + 1 :] if not _lies_within(each, part)]
        self._open[at:] = later

    def _count(self, first: Any, last: Any) -> None:
        self._marks.append((last, self.current))
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self.spans, at = [], 0.0
        before = first
        for mark, part in self._marks:
            seconds = before.elapsed_time(mark) / 1e3 if self._cuda else mark - before
            if seconds > 0:
                self.spans.append(Span(part, at, seconds))
            at += seconds
            before = mark
        self.seconds = at
        self._marks = []

    # hooks

    def _before(self, module: nn.Module, inputs: Any) -> None:
        name = self._names.get(module)
        if name is None:
            return
        self._begin(Part(name, "forward"))
        part = Part(name, "backward")
        # Also within backward, where a module is computed again.
        self._hook(inputs, lambda _: self._end(part))

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        name = self._names.get(module)
        if name is None:
            return
        self._end(Part(name, "forward"))
        part = Part(name, "backward")
        self._hook(outputs, lambda _: self._begin_backward(part))

    def _hook(self, values: Any, call: Callable[[Tensor], None]) -> None:
        """Call at the gradient of the first tensor that gets one through the graph."""
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._hooks.append(value.register_hook(call))
                return

    def _begin_backward(self, part: Part) -> None:
        if not self._in_pass and in_backward():
            self._in_pass = True
            self._begin(Part(OUTSIDE, "backward"))
            after_backward(self._end_pass)
        self._begin(part)

    def _end_pass(self) -> None:
        self._in_pass = False
        self._end(Part(OUTSIDE, "backward"))

    def _waits(self, begins: bool) -> None:
        (self._begin if begins else self._end)(Part("waiting", ""))


def _lies_within(inner: Part, outer: Part) -> bool:
    if outer.name == OUTSIDE:
        return True
    if inner.phase != outer.phase:
        return outer.phase != "backward"
    return not outer.name or inner.name.startswith(f"{outer.name}.")


def by_phase(totals: Mapping[Part, float]) -> dict[str, float]:
    """{"forward", "backward", "optimizer", "waiting", "other"}: seconds of a step.

    Args:
        totals: As `Parts.totals` gives them.
    """
    found = dict.fromkeys(("forward", "backward", "optimizer", "waiting", "other"), 0.0)
    for part, seconds in totals.items():
        own = part.phase or (part.name if part.name in found else "other")
        found[own] += seconds
    return found
