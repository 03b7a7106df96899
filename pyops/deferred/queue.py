"""The queue of weight gradients that were put off.

with queue.collecting():            dy, x --> queue
    torch.autograd.backward(loss)
queue.take().accumulate()           dW = dy^T x, db = sum of dy --> .grad or main_grad, hooks
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyops.deferred.gradients import local_gradient
from pyops.torch_private import post_accumulate_grad_hooks, tensor_hooks

__all__ = ["Deferred", "Pieces"]


class Deferred:
    """A queue of weight gradients, carried by these parameters as their attribute `deferred`.

    Nothing is put off but within `collecting()`. Where several queues have a parameter in common,
    that of the latest one to collect takes it.

    Raises:
        ValueError: For a tensor that is no leaf of autograd's graph: it has no gradient to put off.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        for p in self._parameters:
            if not p.is_leaf:
                raise ValueError(
                    f"a tensor {tuple(p.shape)} was computed from others; give a model's "
                    "own parameters"
                )
        self._passes: list[_Pass] = []
        self._now: _Pass | None = None
        self._mark()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """The weight gradients of a backward pass within this are put off; if it raises, what it
        put off is dropped.

        Gradients and hooks of a parameter stay as they are until `accumulate`. One that another
        module uses as well (a tied embedding) gets its whole gradient within this instead, when the
        other's share of it is there.
        """
        if self._now is not None:
            raise RuntimeError(
                "this queue is collecting already; end that backward pass before the next one"
            )
        self._mark()
        now: _Pass = {}
        self._now = now
        try:
            yield
            self._passes.append(now)
        finally:
            self._now = None
            for waiting in now.values():
                waiting.show_hooks()

    def take(self) -> Pieces:
        """What was put off since the last take."""
        taken, self._passes = self._passes, []
        return Pieces(taken)

    def put(self, parameter: Tensor, dy: Tensor, x: Tensor | None) -> bool:
        """Put off dy^T x, or the sum of dy, if this queue is collecting; whether it is.

        Args:
            parameter: A weight [out, in], or a bias [out].
            dy: The gradient of the output, [rows, out].
            x: The input, [rows, in]; None for a bias.

        Returns:
            Whether this queue is collecting, and so has put it off.
        """
        if self._now is None:
            return False
        if id(parameter) not in self._now:
            self._now[id(parameter)] = _Waiting(parameter)
        self._now[id(parameter)].keep(dy, x)
        return True

    def release(self) -> None:
        """Take the mark off the parameters, and drop what was put off."""
        self._passes = []
        for p in self._parameters:
            if getattr(p, "deferred", None) is self:
                del p.deferred  # type: ignore[attr-defined]

    def _mark(self) -> None:
        for p in self._parameters:
            p.deferred = self  # type: ignore[attr-defined]


class Pieces:
    """Weight gradients that were put off."""

    def __init__(self, passes: list[_Pass]) -> None:
        self._passes = passes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors kept; one kept for several gradients counts once."""
        kept = {
            t.data_ptr(): t.nbytes
            for each in self._passes
            for waiting in each.values()
            for t in waiting.tensors()
        }
        return sum(kept.values())

    def accumulate(self) -> None:
        """Compute them and add them to .grad as a backward pass would, hooks and all, or to
        main_grad.

        What is kept for a parameter is let go as soon as its gradient is there; afterwards there is
        nothing left to add. The gradients of several backward passes are added one after the other.
        On CUDA: computed on the current stream, which must be behind the one of backward.

        It is one backward pass for each that was put off. DataParallel and ZeroOptimizer reduce
        gradients when a backward pass ends: run those within collecting() under their no_sync(),
        and this one, for the last of them, without.

        Raises:
            RuntimeError: Where a tensor kept was changed in place meanwhile.
        """
        while self._passes:
            waiting = [w for w in self._passes.pop(0).values() if w.operands]
            # one backward for all, as those who reduce gradients expect; begins with the last made
            with torch.enable_grad():
                kept = [_Kept.apply(w.parameter, w) for w in reversed(waiting)]  # type: ignore[no-untyped-call]
            if kept:
                torch.autograd.backward(kept)


class _Waiting:
    """What one backward pass put off for one parameter, whose hooks are hidden from autograd until
    the pass is over.

    Autograd calls the hooks of a parameter for a gradient of None, too.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.operands: list[tuple[Tensor, int, Tensor | None, int]] = []
        self.gradient_hooks = _emptied(tensor_hooks(parameter))
        self.accumulate_hooks = _emptied(post_accumulate_grad_hooks(parameter))
        self.arrival = parameter.register_hook(self._arrived) if parameter.requires_grad else None

    def keep(self, dy: Tensor, x: Tensor | None) -> None:
        # Detached: what computed them need not live on.
        x = None if x is None else x.detach()
        self.operands.append((dy.detach(), dy._version, x, 0 if x is None else x._version))

    def tensors(self) -> list[Tensor]:
        return [t for dy, _, x, _ in self.operands for t in (dy, x) if t is not None]

    def show_hooks(self) -> None:
        if self.arrival is not None:
            self.arrival.remove()
            self.arrival = None
        _refilled(tensor_hooks(self.parameter), self.gradient_hooks)
        _refilled(post_accumulate_grad_hooks(self.parameter), self.accumulate_hooks)

    def _arrived(self, gradient: Tensor | None) -> Tensor | None:
        """Another module's share, which autograd is about to add to .grad: ours goes with it, and
        the hooks run."""
        if gradient is None:
            return None
        found = self.computed()
        if found is not None:
            gradient = found + gradient
        for hook in list(self.gradient_hooks.values()):
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
        _refilled(post_accumulate_grad_hooks(self.parameter), self.accumulate_hooks)
        return gradient

    @torch.no_grad()
    def computed(self) -> Tensor | None:
        """The sum in the order in which they came; None where there is nothing, or main_grad has
        it."""
        total = None
        while self.operands:
            dy, dy_version, x, x_version = self.operands.pop(0)
            if dy._version != dy_version or (x is not None and x._version != x_version):
                raise RuntimeError(
                    f"the gradient of a parameter {tuple(self.parameter.shape)} was put "
                    "off, and a tensor that it needs has "
                    "been changed in place since; accumulate() before a buffer of "
                    "activations or gradients is filled again"
                )
            found = local_gradient(self.parameter, dy, x)
            total = found if total is None or found is None else total.add_(found)
        return total


class _Kept(torch.autograd.Function):
    """A number whose backward is the gradient that was put off: computed there, it becomes .grad
    without a copy."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, waiting: _Waiting) -> Tensor:
        ctx.waiting = waiting
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.waiting.computed(), None


_Pass = dict[int, _Waiting]


def _emptied(hooks: dict[int, Callable[..., Any]] | None) -> dict[int, Callable[..., Any]]:
    held = dict(hooks or {})
    if hooks:
        hooks.clear()
    return held


def _refilled(
    hooks: dict[int, Callable[..., Any]] | None, held: dict[int, Callable[..., Any]]
) -> None:
    if hooks is not None:
        hooks.update(held)
    held.clear()
