"""FlatBuffer: the parameters of one dtype in one tensor, their gradients in another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pyops.flat.dtensor import is_dtensor
from pyops.flat.layout import FlatLayout
from pyops.flat.places import Places, Watch
from pyops.ops.memory import require_memory

__all__ = ["FlatBuffer"]


def _check(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """ValueError or TypeError, before anything is changed, for parameters that can't share a
    buffer."""
    if not named:
        raise ValueError("FlatBuffer needs at least one parameter, got none")
    first_name, first = named[0]
    seen: dict[int, str] = {}
    for name, parameter in named:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"{name} is a {type(parameter).__name__}; expected an nn.Parameter")
        if is_dtensor(parameter):
            raise TypeError(
                f"parameter {name!r} is a DTensor (of fully_shard or a DeviceMesh), "
                "which no flat buffer can hold; use either "
                "torch's sharding, with an optimizer of pyops.optim, or a strategy of "
                "pyops on the model before it"
            )
        if id(parameter) in seen:
            raise ValueError(
                f"{name} is the same parameter as {seen[id(parameter)]}; pass a shared "
                "parameter once"
            )
        seen[id(parameter)] = name
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}, {first_name} is "
                f"{first.dtype} on {first.device}; "
                "make one FlatBuffer per dtype and device"
            )
        if parameter.layout != torch.strided or not (
            parameter.is_floating_point() or parameter.is_complex()
        ):
            raise ValueError(
                f"{name} is {parameter.dtype}, {parameter.layout}; expected a dense "
                "floating-point parameter"
            )
        if not parameter.is_meta:
            require_memory(parameter, name)
        if (
            parameter.grad is not None
            and parameter.grad.layout == torch.strided
            and not parameter.grad.is_meta
        ):
            require_memory(parameter.grad, f"the gradient of {name}")


def _check_gradient(grad: Tensor | None, numel: int, like: Tensor) -> None:
    """ValueError for memory in which the flat gradient of `numel` numbers can't lie."""
    if grad is None:
        return
    found = (grad.dim(), grad.numel(), grad.dtype, grad.device)
    if found != (1, numel, like.dtype, like.device) or not grad.is_contiguous():
        raise ValueError(
            f"grad is {tuple(grad.shape)} of {grad.dtype} on {grad.device}; give a contiguous "
            f"tensor of ({numel},) of {like.dtype} on {like.device}"
        )


class FlatBuffer:
    """Parameters and gradients of one dtype and device, laid out in backward order; each parameter
    becomes a view.

    layout      the FlatLayout
    data, grad  the flat tensors; parameter.data and parameter.grad are views of them
    parameter   an nn.Parameter over `data` whose .grad is `grad`: give it to an optimizer in place
                of the many. Its attribute `flat_layout` is the layout, by which LAMB, LARS and
                Adafactor know their layers
    names, parameters, grad_views   in the buffer's order

    Don't move the module or assign new data to its parameters afterwards: DataParallel and the
    optimizers of pyops.optim over `parameter` raise ValueError then. load_state_dict is fine. A
    gradient that was set
    to None is put back by `restore_gradient`.

    Args:
        named_parameters: (name, parameter) in registration order, as `module.named_parameters()`
            gives them; the buffer holds them in reverse. A non-contiguous parameter keeps its
            values and becomes contiguous.
        multiple_of: The buffer's length is a multiple of it.
        grad: Memory for the flat gradient: flat, as long as the layout, of the parameters' dtype
            and device. None: memory of its own.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        multiple_of: int = 1,
        grad: Tensor | None = None,
    ) -> None:
        named = list(named_parameters)
        _check(named)
        self.layout = self.layout_of(named, multiple_of=multiple_of)
        _check_gradient(grad, self.layout.numel, named[0][1])
        named.reverse()
        self.names = self.layout.names
        self.parameters = [p for _, p in named]
        like = self.parameters[0]
        self.data = torch.zeros(self.layout.numel, dtype=like.dtype, device=like.device)
        self.grad = torch.zeros_like(self.data) if grad is None else grad.zero_()
        self.grad_views: list[Tensor] = self._views_of(self.grad)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                where, shape = self.layout.slice_at(index), self.layout.shapes[index]
                grad_view, before = self.grad_views[index], parameter.grad
                self.data[where].view(shape).copy_(parameter)
                if before is not None:
                    grad_view.copy_(before)
                parameter.grad = None  # a gradient of other strides would keep .data from being set
                parameter.data = self.data[where].view(shape)
                parameter.grad = grad_view
        self.parameter = nn.Parameter(self.data, requires_grad=True)
        self.parameter.grad = self.grad
        self.parameter.flat_layout = self.layout  # type: ignore[attr-defined]  # for optimizers that go by layers
        self.parameter.flat_watch = Watch(Places(self))  # type: ignore[attr-defined]  # for optimizers, before a step
        self._index = {id(p): i for i, p in enumerate(self.parameters)}

    @staticmethod
    def layout_of(
        named_parameters: Iterable[tuple[str, nn.Parameter]], *, multiple_of: int = 1
    ) -> FlatLayout:
        """The layout that a buffer of these parameters has."""
        backward = reversed(list(named_parameters))
        return FlatLayout.plan([(name, p.shape) for name, p in backward], multiple_of=multiple_of)

    def __len__(self) -> int:
        return len(self.parameters)

    def index(self, parameter: nn.Parameter) -> int:
        """The parameter's position in the buffer."""
        if id(parameter) not in self._index:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is not in this buffer, "
                f"which holds {self.names}"
            )
        return self._index[id(parameter)]

    def _views_of(self, grad: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat gradient."""
        layout = self.layout
        return [grad[layout.slice_at(i)].view(shape) for i, shape in enumerate(layout.shapes)]

    def move_gradient(self, grad: Tensor) -> None:
        """The flat gradient is `grad` from now on, with the values that it has; the one before
        keeps its own.

        Args:
            grad: As of the class.
        """
        _check_gradient(grad, self.layout.numel, self.data)
        self.grad, self.grad_views = grad, self._views_of(grad)
        self.parameter.grad = grad
        for parameter, view in zip(self.parameters, self.grad_views, strict=True):
            parameter.grad = view

    def zero_grad(self) -> None:
        """Zero all gradients in one pass and make every parameter.grad its view again."""
        self.grad.zero_()
        for parameter, view in zip(self.parameters, self.grad_views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    @torch.no_grad()
    def restore_gradient(self, index: int) -> bool:
        """Make the parameter's .grad the view again, with the values it had; says whether there was
        a gradient.

        A .grad of None leaves zeros in the view. After the call, the flat gradient is exact at this
        parameter.
        """
        parameter, view = self.parameters[index], self.grad_views[index]
        found = parameter.grad
        if found is view:
            return True
        if found is None:
            view.zero_()
        else:
            view.copy_(found)
        parameter.grad = view
        return found is not None
