"""Parameters between their uses at stage 3: what touches values that are not there gets them, or an
error with the fix.

    while its unit computes   p is what it was: an nn.Parameter over the gathered memory
    between two uses          p's class is a subclass whose operations first call `touched(p)`,
                              which gathers or raises

The object stays the same, so autograd, optimizers and modules know it still; only its class
changes, as torch.nn's own UninitializedParameter changes its class when it is given memory. Shape,
dtype, device, hooks and `.grad` are answered as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from pyops.torch_private import parse_to, without_torch_function

__all__ = ["ParameterGuard"]

Touched = Callable[[nn.Parameter], None]

# What can be answered without the values. Whatever is not here needs them, for all that is known.
_METHODS = frozenset(
    {
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "__len__",
        "element_size",
        "storage_offset",
        "is_complex",
        "is_floating_point",
        "is_contiguous",
        "is_signed",
        "is_inference",
        "is_conj",
        "is_neg",
        "get_device",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "untyped_storage",
        "has_names",
        "__hash__",
        "is_pinned",
        "is_shared",
        "is_distributed",
        "is_same_size",
        "__format__",
        "dim_order",
        "_has_compatible_shallow_copy_type",
        "_is_view",
        "_typed_storage",
        "storage_type",
    }
)
# Properties that look at, or are views of, the values.
_VIEWS = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class _GuardedParameter:
    """What the class of a spread parameter has before its own class: see the page's head."""

    _own_class: type
    _touched: Touched

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if not _needs_values(func, args, kwargs):
                # torch copies from `cpu` to `cpu:0`, and there is nothing to copy.
                return args[0] if getattr(func, "__name__", "") == "to" else func(*args, **kwargs)
            for parameter in _found((args, kwargs)):
                type(parameter)._touched(parameter)
            return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        with without_torch_function():
            shape, dtype = tuple(self.shape), self.dtype  # type: ignore[attr-defined]
        return f"Parameter of shape {shape}, {dtype}, spread over the ranks"


def _needs_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in (
        "__get__",
        "__set__",
        "__delete__",
    ):  # of a property, whose name the descriptor behind the method tells
        return name == "__get__" and getattr(func.__self__, "__name__", "") in _VIEWS
    if name in ("to", "type", "cpu", "float", "double", "half", "bfloat16"):
        return not _stays(name, args, kwargs)
    return name not in _METHODS


def _stays(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the conversion gives the tensor itself."""
    tensor = args[0]
    layouts = [*args[1:], kwargs.get("memory_format", torch.preserve_format)]
    if kwargs.get("copy", False) or any(
        isinstance(f, torch.memory_format) and f != torch.preserve_format for f in layouts
    ):
        return False
    if name == "to":
        if any(isinstance(each, Tensor) for each in args[1:]):
            return False
        given = {key: value for key, value in kwargs.items() if key != "copy"}
        device, dtype, *_ = parse_to(*args[1:], **given)
        same_type = device is None or device.type == tensor.device.type
        same_device = same_type and (
            device is None or device.index in (None, tensor.device.index) or device.type == "cpu"
        )
        return same_device and dtype in (None, tensor.dtype)
    if name == "cpu":
        return bool(tensor.device.type == "cpu")
    if name == "type":
        return len(args) == 1 and not kwargs
    wanted = {
        "float": torch.float32,
        "double": torch.float64,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
    }[name]
    return bool(tensor.dtype == wanted)


def _found(value: Any) -> Iterable[Any]:
    """The spread parameters among the arguments."""
    if isinstance(value, _GuardedParameter):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _found(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _found(each)


class ParameterGuard:
    """Takes parameters' values from sight, and gives them back.

    Args:
        touched: A method, called with a parameter before an operation that needs values which are
            not there; it brings them, or raises. Its object is not kept alive.
    """

    def __init__(self, touched: Touched) -> None:
        method = WeakMethod(
            touched
        )  # the classes below are garbage that only a collection of circles finds

        def call(parameter: nn.Parameter) -> None:
            alive = method()
            if alive is None:
                raise RuntimeError(
                    "a ZeroOptimizer spread the parameters over the ranks, and is gone; "
                    "make the model anew"
                )
            alive(parameter)

        self._touched = call
        self._classes: dict[type, type] = {}

    def _spread_class(self, own: type) -> type:
        if own not in self._classes:
            members = {
                "_own_class": own,
                "_touched": staticmethod(self._touched),
                "__module__": own.__module__,
            }
            self._classes[own] = type(own)(own.__name__, (_GuardedParameter, own), members)
        return self._classes[own]

    def spread(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their memory is given back, or will be."""
        for parameter in parameters:
            if not isinstance(parameter, _GuardedParameter):
                parameter.__class__ = self._spread_class(type(parameter))

    def gathered(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their values are there."""
        for parameter in parameters:
            if isinstance(parameter, _GuardedParameter):
                parameter.__class__ = parameter._own_class
