"""What `.grad` of a parameter is after backward: the gradient of all ranks, of which this one has a
part.

    p.grad                                  ReducedGradient: shape and dtype of the whole, elements
                                            in this rank's chunk
    torch.nn.utils.clip_grad_norm_          norms of all parameters at the first one asked for, by
                                            one small all-reduce;
    torch.nn.utils.clip_grad_value_         what goes element by element changes each rank's part
    GradScaler.unscale_                     what one rank finds, all are told
    anything that needs other ranks' parts  RuntimeError, with what to do instead

torch's DTensor does this for parts that are rows; a chunk begins and ends anywhere in the flattened
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.torch_private import (
    NO_TORCH_FUNCTION,
    graph_task_id,
    in_backward,
    unscale_and_check_finite,
)

__all__ = ["GradientNorms", "ReducedGradient"]

aten: Any = torch.ops.aten
SCALING = {
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.zero_.default,
}
SCALING_LISTS = {
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_mul_.ScalarList,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
    aten._foreach_div_.ScalarList,
    aten._foreach_zero_.default,
}
BY_ELEMENT = {
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.nan_to_num_.default,
}
BY_ELEMENT_LISTS = {aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar}
NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dtype}


class GradientNorms:
    """Norms of the reduced gradients, alike on all ranks.

    Args:
        parts: This rank's part of each parameter's gradient, in the same order on all ranks.
        communicator: Of the ranks that have the other parts, None where this one has everything.
        partial: Why gradients are not final before the step, None where they are.
        other_axes: Of the tensor-parallel ranks and of the pipeline stages, which must find the
            same overflow.
    """

    def __init__(
        self,
        parts: Callable[[], Sequence[Tensor]],
        communicator: Communicator | None,
        device: torch.device,
        partial: str | None = None,
        other_axes: Sequence[Communicator] = (),
    ) -> None:
        self._parts, self.communicator, self._device, self.partial = (
            parts,
            communicator,
            device,
            partial,
        )
        self.axes = [each for each in (communicator, *other_axes) if each is not None]
        self._found: dict[float, Tensor] = {}
        self.added: tuple[int, int] | None = (
            None  # the last that autograd has added to: its number, and the backward's
        )

    def changed(self) -> None:
        """The gradients are others now."""
        self._found.clear()

    def of(self, number: int, order: float) -> Tensor:
        """The norm of gradient `number`, float64. A collective at the first call after a change."""
        if order not in self._found:
            self._found[order] = self._measure(order)
        return self._found[order][number]

    def _measure(self, order: float) -> Tensor:
        if not order > 0:
            raise RuntimeError(
                f"the {order}-norm of a gradient that is spread over the ranks is not "
                "offered; give 1, 2 or inf"
            )
        parts = [part.detach().double() for part in self._parts()]
        if math.isinf(order):
            largest = [part.abs().max() if part.numel() else part.new_zeros(()) for part in parts]
            mine = torch.stack([each.to(self._device) for each in largest])
            if self.communicator is None:
                return mine
            rows = torch.zeros(
                self.communicator.size, len(mine), dtype=mine.dtype, device=mine.device
            )
            rows[self.communicator.rank] = mine
            all_reduce(rows, communicator=self.communicator, label="largest elements of gradients")
            return rows.amax(0)
        sums = torch.stack([part.abs().pow_(order).sum().to(self._device) for part in parts])
        if self.communicator is not None:
            all_reduce(sums, communicator=self.communicator, label="norms of gradients")
        return sums.pow_(1 / order)


class ReducedGradient(Tensor):
    """See the page's head.

    Args:
        number: Of the parameter, in `norms`. local: gives this rank's part, None when it is used
            up.
    """

    label: str
    number: int
    norms: GradientNorms
    _local: Callable[[], Tensor | None]
    _arrived: Tensor | None

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        device: torch.device,
        *,
        label: str,
        number: int,
        norms: GradientNorms,
        local: Callable[[], Tensor | None],
    ) -> ReducedGradient:
        made: ReducedGradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.label, made.number, made.norms, made._local, made._arrived = (
            label,
            number,
            norms,
            local,
            None,
        )
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"ReducedGradient of {self.label}, shape {tuple(self.shape)}, {self.dtype}, "
            "spread over the ranks"
        )

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        in_list = bool(args) and isinstance(args[0], list | tuple)
        first = next(
            (each for each in (args[0] if in_list else args) if isinstance(each, ReducedGradient)),
            None,
        )
        if first is None or (not in_list and first is not args[0]):
            raise _refusal(func, first)
        if func is aten.detach.default:
            return first.alias()
        if func in (aten.add_.Tensor, aten.add.Tensor) and in_backward():
            return first._accumulate(args[1], in_place=func is aten.add_.Tensor)
        if func in NORMS or func is aten._foreach_norm.Scalar:
            return _norm(func, args, kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(args[0], *args[1:])
        scaling = func in SCALING or func in SCALING_LISTS
        if not scaling and func not in BY_ELEMENT and func not in BY_ELEMENT_LISTS:
            raise _refusal(func, first)
        if any(isinstance(each, Tensor) and each.dim() for each in args[1:]) or (
            first.norms.partial and not scaling
        ):
            raise _refusal(func, first)
        func([_part(each) for each in args[0]] if in_list else first.part(), *args[1:], **kwargs)
        first.norms.changed()
        return None if in_list else args[0]  # as their schemas say

    def alias(self) -> ReducedGradient:
        return ReducedGradient(
            self,
            self.device,
            label=self.label,
            number=self.number,
            norms=self.norms,
            local=self._local,
        )

    def is_of(self, value: object) -> bool:
        """Whether `value` is the gradient of the same parameter, as detach() and .data give it
        anew."""
        return (
            isinstance(value, ReducedGradient)
            and value.number == self.number
            and value.norms is self.norms
        )

    def part_or_none(self) -> Tensor | None:
        """This rank's elements, 1-D; None when they are used up."""
        return self._local()

    def part(self) -> Tensor:
        """This rank's elements, 1-D.

        Raises:
            RuntimeError: When they are used up.
        """
        found = self._local()
        if found is None:
            raise RuntimeError(
                f"the gradient of {self.label} is used up: a step or zero_grad() came "
                "after the backward it is of"
            )
        return found

    def _accumulate(self, coming: Tensor, *, in_place: bool) -> Tensor:
        """Autograd adds the gradient of another backward: it has to be reduced first, so it is put
        aside for the bucket."""
        self.norms.added = self.number, graph_task_id()
        if not in_place:  # create_graph=True
            return coming.clone()
        self._arrived = coming
        return self

    def take_arrived(self) -> Tensor | None:
        found, self._arrived = self._arrived, None
        return found


def _part(value: Any) -> Tensor:
    return value.part() if isinstance(value, ReducedGradient) else value


def _refusal(func: Any, gradient: ReducedGradient | None) -> RuntimeError:
    what = "a gradient" if gradient is None else f"the gradient of {gradient.label}"
    more = f" ({gradient.norms.partial})" if gradient is not None and gradient.norms.partial else ""
    return RuntimeError(
        f"{what} is spread over the ranks after backward, and {func} is not offered on "
        f"it{more}; pass max_grad_norm= to "
        "ZeroOptimizer, or use torch.nn.utils.clip_grad_norm_ or clip_grad_value_, "
        "norms, products with a number, "
        "optimizer.gradient_squares(), or each rank's part in optimizer.reduced_gradients()"
    )


def _norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    whole = len(args) < 3 or args[2] is None or not args[2]
    listed = isinstance(args[0], list | tuple)
    found = []
    for each in args[0] if listed else [args[0]]:
        if not isinstance(each, ReducedGradient):
            found.append(torch.linalg.vector_norm(each, order))
            continue
        if each.norms.partial or (
            not listed and func is aten.linalg_vector_norm.default and not whole
        ):
            raise _refusal(func, each)
        each.part()  # or it is used up
        wide = each.dtype if each.dtype in (torch.float32, torch.float64) else torch.float32
        wide = kwargs.get("dtype") or wide
        found.append(
            each.norms.of(each.number, float(2 if order is None else order)).to(each.device, wide)
        )
    return found if listed else found[0]


def _unscale(gradients: Sequence[Any], found_inf: Tensor, inverse: Tensor) -> None:
    """As torch's GradScaler: times `inverse`, and found_inf is 1 where a number is not finite on
    any rank."""
    parts = [part for each in gradients if (part := _part(each)).numel()]
    if parts:
        unscale_and_check_finite(parts, found_inf, inverse)
    norms = next(each.norms for each in gradients if isinstance(each, ReducedGradient))
    norms.changed()
    for communicator in norms.axes:
        all_reduce(found_inf, communicator=communicator, label="whether gradients are finite")
        found_inf.clamp_(max=1.0)
