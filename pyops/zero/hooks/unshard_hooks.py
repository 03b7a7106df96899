"""When the parameters of a unit are whole: gathered just before use, the next unit's meanwhile, and
let go of afterwards.

    forward    gather 0 | 0        | 1        | 2        | 3        |   backward begins with 3, so
                                                                        3 is kept
                        | gather 1 | gather 2 | gather 3 |
    backward            | 3        | 2        | 1        | 0        |
                        | gather 2 | gather 1 | gather 0 |
                                   | reduce 3 | reduce 2 | reduce 1 | reduce 0

What comes next is what came next the last time. If it is another unit, that one is gathered when it
is needed: an order that changes costs time and never changes a result. All ranks must run the same
units in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyops.comm.collectives.communicator import Communicator
from pyops.torch_private import after_backward, disable_dynamo, in_backward
from pyops.zero.hooks.module_hook import ModuleHook
from pyops.zero.hooks.parameter_guard import ParameterGuard
from pyops.zero.hooks.sharded_unit import ShardedUnit
from pyops.zero.hooks.unit_trace import UnitTrace
from pyops.zero.layout.quantized_comm import QuantizedComm
from pyops.zero.layout.sharded import ShardedParameters

__all__ = ["UnshardHooks"]


class _AfterBackward(torch.autograd.Function):
    """Identity whose backward tells that the gradients of a unit's inputs are there, so that its
    own backward is over."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.tell = tell
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.tell()
        return (None, *gradients)


def _in_backward() -> bool:
    return in_backward()


class UnshardHooks:
    """Hooks on the modules of the units.

    Args:
        reduce: Called with a unit when all its gradients are there, in backward.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        communicator: Communicator | None,
        *,
        overlap: bool,
        reduce: Callable[[ShardedUnit], None],
        wire: QuantizedComm,
    ) -> None:
        self.units, self.communicator, self.overlap, self._reduce = (
            list(units),
            communicator,
            overlap,
            reduce,
        )
        self.wire = wire
        self._forward, self._backward = UnitTrace(), UnitTrace()
        self._phase = ""
        self._pinned = False
        self._holders: dict[ShardedParameters, int] = {}
        self._hooks: list[Any] = []
        self._spreading = ParameterGuard(self._touched)
        self._unit_of = {
            id(p): unit for unit in units for flat in unit.flats for p in flat.parameters
        }
        self.is_active = any(flat.is_spread for unit in units for flat in unit.flats)
        if not self.is_active:
            return
        for unit in self.units:
            self._spreading.spread(unit.parameters())
        inside = {id(m) for unit in units if not unit.is_root for m in unit.module.modules()}
        for unit in self.units:
            members = [m for m in unit.module.modules() if not unit.is_root or id(m) not in inside]
            for module in members:
                if module is unit.module or any(True for _ in module.parameters(recurse=False)):
                    before, after = partial(self._before, unit), partial(self._after, unit)
                    self._hooks.append(
                        module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True)
                    )
                    self._hooks.append(
                        module.register_forward_hook(ModuleHook(after), always_call=True)
                    )
            self._hooks.append(
                unit.module.register_state_dict_pre_hook(
                    ModuleHook(partial(self._before_state_dict, unit))
                )
            )

    # ----------------------------------------------------------------------------------------------
    # gathering

    def _start(self, unit: ShardedUnit, *, exact: bool = False) -> None:
        if not unit.whole and self.is_active:
            wire = None if exact else self.wire
            unit.works = [
                flat.start_gather(self.communicator, async_op=self.overlap, wire=wire)
                for flat in unit.flats
            ]
            unit.whole = True

    def _need(self, unit: ShardedUnit, *, exact: bool = False) -> None:
        """The unit's parameters are there when this returns; the next one's are on their way, if
        that is known. exact: as their owners have them, whatever the wire."""
        self._start(unit, exact=exact)
        for work in unit.works:
            work.wait()
        if unit.works and self.wire.secondary is not None and not exact:
            for flat in unit.flats:
                flat.keep(self.wire.secondary)
        unit.works = []
        if not unit.there and self.is_active:
            self._spreading.gathered(unit.parameters())
            unit.there = True

    def _release(self, unit: ShardedUnit) -> None:
        if unit.whole and not self._pinned:
            for work in unit.works:
                work.wait()
            unit.works = []
            if unit.there:
                self._spreading.spread(unit.parameters())
            for flat in unit.flats:
                flat.release()
            unit.whole = unit.there = False

    def release_all(self) -> None:
        """Nothing is whole afterwards: before parameters change. Forgets what is still to come of a
        broken-off backward."""
        for unit in self.units:
            self._release(unit)
            unit.open, unit.calls = None, 0
            for flat in unit.flats:
                flat.forget()
        self._phase = ""

    def pin(self, wanted: bool) -> None:
        """True: gather everything, and keep it. False: keep this rank's chunks as they are now, and
        let go of the rest."""
        if not self.is_active:
            return
        if wanted:
            for unit in self.units:
                if self.wire.gather is not None:
                    self._release(unit)  # what is whole may be what the codec made of it
                self._need(unit, exact=True)
            self._pinned = True
            self._holders = {flat: flat.holders() for unit in self.units for flat in unit.flats}
            return
        self._pinned = False
        for unit in self.units:
            for flat in unit.flats:
                flat.take_over()
                if (
                    flat.holders() > self._holders[flat] and flat.partition.ranks > 1
                ):  # a state_dict(), say
                    flat.leave()
        self.release_all()

    # ----------------------------------------------------------------------------------------------
    # forward

    def _enter(self, phase: str) -> None:
        if self._phase != phase:
            self._phase = phase
            (self._forward if phase == "forward" else self._backward).begin()

    def _turn(self, unit: ShardedUnit, trace: UnitTrace) -> None:
        """Gather the unit, let go of those that have had theirs, and fetch the next."""
        following = trace.after(unit)
        for other in self.units:
            stays = other.is_root or other.wide or other.open is not None
            if other is not unit and other is not following and not stays:
                self._release(other)
        self._start(unit)
        if following is not None and self.overlap:
            self._start(following)
        for coming in trace.soon():
            for flat in coming.flats:
                flat.read_ahead()
        self._need(unit)

    @disable_dynamo
    def _before(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward begins."""
        again = _in_backward()  # a recomputation
        if unit.is_root and module is unit.module and not again:
            if not any(other.open is not None for other in self.units):
                self._phase = ""
            self._enter("forward")
            first = self._forward.first()
            if first is not None and first is not unit and self.overlap:
                self._start(unit)
                self._start(first)
        if unit.open is not None:
            return None
        unit.open = module
        if again or unit.is_root:
            self._need(unit)
        else:
            self._enter("forward")
            self._turn(unit, self._forward)
        if unit.is_root or not torch.is_grad_enabled():
            return None
        return self._watch_inputs(unit, args, kwargs)

    def _watch_inputs(self, unit: ShardedUnit, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        places = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not places:
            return None
        watched = _AfterBackward.apply(  # type: ignore[no-untyped-call]
            partial(self._end_backward_of, unit), *(leaves[i] for i in places)
        )
        for i, tensor in zip(places, watched, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, spec)

    @disable_dynamo
    def _after(self, unit: ShardedUnit, module: nn.Module, args: Any, output: Any) -> None:
        """A forward ends, also by an exception."""
        if unit.open is not module:
            return
        unit.open = None
        again = _in_backward()
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
        # In a recomputation the modules within a unit come by themselves: what they return stays in
        # the unit, which backward holds whole.
        within = again and module is not unit.module
        leaves = not unit.wide and not unit.is_root and not within
        if leaves and any(unit.holds(t) for t in tensors):
            self._widen(
                unit,
                f"{type(module).__name__} returns a parameter of {unit.name}, or a view of one",
            )
        wanted = [t for t in tensors if t.requires_grad]
        if torch.is_grad_enabled() and wanted:
            for tensor in wanted:
                tensor.register_hook(partial(self._begin_backward_of, unit))
            if not again:
                unit.calls += 1
        elif unit.is_root and not again:
            for other in self.units:
                self._release(other)

    def forward_left(self, values: Sequence[Any]) -> None:
        """The model's forward was left by an exception, with these values in the place of its
        outputs: their backward begins with what is the model's own."""
        if not self.is_active:
            return
        root = next(unit for unit in self.units if unit.is_root)
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._begin_backward_of, root))

    # ----------------------------------------------------------------------------------------------
    # backward

    def _begin_backward_of(self, unit: ShardedUnit, gradient: Tensor) -> None:
        if self._phase != "backward":
            self._enter("backward")
            after_backward(self.end_backward)
        if unit.is_root:
            self._need(unit)
        else:
            self._turn(unit, self._backward)

    def _end_backward_of(self, unit: ShardedUnit) -> None:
        unit.calls = max(0, unit.calls - 1)
        if unit.wide:  # more gradients may come
            return
        if unit.open is None:
            self._release(unit)
        if unit.calls == 0:
            self._reduce(unit)

    def end_backward(self) -> None:
        """Backward is over."""
        for unit in self.units:
            self._release(unit)
        self._phase = ""

    # ----------------------------------------------------------------------------------------------
    # guards

    def _touched(self, parameter: nn.Parameter) -> None:
        """Somebody needs values that are not there: in forward and backward, which all ranks run
        alike, they are gathered."""
        unit = self._unit_of[id(parameter)]
        name = next(
            name
            for flat in unit.flats
            for name, p in zip(flat.names, flat.parameters, strict=True)
            if p is parameter
        )
        if not (_in_backward() or any(other.open is not None for other in self.units)):
            raise RuntimeError(
                f"{name} is spread over the ranks (ZeRO stage 3), its values are in "
                f"memory only while {unit.name} computes; "
                "to look at it, to copy, change, move or wrap the model, do so within "
                "`with optimizer.whole_parameters():`, "
                "which every rank enters; a forward goes through the model's own call"
            )
        if not unit.wide and not unit.is_root:
            self._widen(unit, f"{name} is used outside of the forward of {unit.name}")
        self._need(unit)

    def _widen(self, unit: ShardedUnit, why: str) -> None:
        unit.wide = True
        warnings.warn(
            f"ZeroOptimizer: {why}, so {unit.name} stays whole until the end of "
            "backward; the result is the same, and it takes "
            "more memory; choose units= so that what uses a parameter lies in its unit",
            stacklevel=2,
        )

    def _before_state_dict(
        self, unit: ShardedUnit, module: nn.Module, prefix: str, keep_vars: bool
    ) -> None:
        if not self._pinned and any(other.flats for other in self.units):
            raise RuntimeError(
                "the parameters are spread over the ranks: take "
                "optimizer.model_state_dict(), each rank's part, or "
                "`with optimizer.whole_parameters(): model.state_dict()` on every rank"
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for unit in self.units:
            self._spreading.gathered(unit.parameters())
