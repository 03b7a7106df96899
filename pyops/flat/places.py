"""Whether parameters are where they were put: views of a flat tensor, and the very objects that the
model's modules hold.

    model.half(), p.data = x                     the parameter has other memory than the flat tensor
                                                 that is trained
    load_state_dict(assign=True), m.weight = p   the module has another parameter, of which nobody
                                                 knows
    model.head = nn.Linear(8, 2)                 the model has another module, with parameters of
                                                 which nobody knows
    a second wrapper                             the parameter is a view of another flat tensor

All of this is silent in torch. It is found by comparing pointers, two for each parameter and one
for each module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from operator import is_
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pyops.flat.layout import FlatLayout
from pyops.torch_private import without_torch_function

__all__ = [
    "Entries",
    "Flat",
    "InPlace",
    "Places",
    "Watch",
    "check_free",
    "check_watches",
    "claim",
    "release",
    "watches_of",
]


class Flat(Protocol):
    """A flat tensor and the parameters that are views of it, in the order of its layout."""

    data: Tensor
    parameters: list[nn.Parameter]

    @property
    def layout(self) -> FlatLayout: ...


class Places:
    """Where the parameters of one flat tensor have to lie, also while it has no memory, or other
    memory than before."""

    def __init__(self, flat: Flat) -> None:
        self._data, self._parameters, self.names = (
            flat.data,
            list(flat.parameters),
            flat.layout.names,
        )
        size = flat.data.element_size()
        self._offsets = [
            offset * size if prod(shape) else None
            for offset, shape in zip(flat.layout.offsets, flat.layout.shapes, strict=True)
        ]
        self._base, self._expected = -1, [0] * len(self._offsets)

    def displaced(self) -> int | None:
        """The number of the first parameter that lies elsewhere; None where all lie where they
        should."""
        base = self._data.data_ptr()
        if base != self._base:
            self._base, self._expected = (
                base,
                [0 if offset is None else base + offset for offset in self._offsets],
            )
        with without_torch_function():  # where a spread parameter lies is known without its values
            found = [parameter.data_ptr() for parameter in self._parameters]
        if found == self._expected:
            return None
        return next(i for i, (a, b) in enumerate(zip(found, self._expected, strict=True)) if a != b)

    def problem(self) -> str | None:
        """What happened to the first displaced parameter, in words."""
        index = self.displaced()
        if index is None:
            return None
        parameter, data = self._parameters[index], self._data
        now = (
            f", and is {parameter.dtype} on {parameter.device} now"
            if _differs(parameter, data)
            else ""
        )
        return (
            f"{self.names[index]} was given other memory than its place in the flat "
            f"tensor of {data.dtype} on {data.device}"
            f"{now}; model.to(), model.half(), `parameter.data = ...` or another wrapper do that"
        )


def _differs(parameter: Tensor, data: Tensor) -> bool:
    return (parameter.dtype, parameter.device) != (data.dtype, data.device)


class Entries:
    """The entries of a model's modules that hold these parameters, and those that hold such
    modules."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        found = [
            (module._parameters, key, parameter, f"{path}.{key}" if path else key)
            for path, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in wanted
        ]
        self._model, self._modules = (
            ref(model),
            [entries for entries, *_ in found],
        )  # a model may hold what looks after it
        self._keys, self._held, self._names = ([each[i] for each in found] for i in (1, 2, 3))
        self._note_modules(model)

    def _note_modules(self, model: nn.Module) -> None:
        """The entries of modules on the way to parameters."""
        wanted = {id(parameter) for parameter in self._held}
        found = [
            (module._modules, key, child)
            for module in model.modules()
            for key, child in module._modules.items()
            if child is not None
            and any(id(parameter) in wanted for parameter in child.parameters())
        ]
        self._parents, self._child_keys = (
            [entries for entries, *_ in found],
            [key for _, key, _ in found],
        )
        self._children = [child for *_, child in found]
        self._known = {id(parameter) for parameter in model.parameters()}

    def _taken_out(self) -> str | None:
        """The name of a parameter in whose place the model has a new one.

        A module that is put around another keeps its own, and one that is only taken out leaves
        nothing to be trained.
        """
        now = list(map(dict.get, self._parents, self._child_keys))
        if all(map(is_, now, self._children)):
            return None
        model = self._model()
        if model is None:
            return None
        present = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
        gone = [
            name
            for name, held in zip(self._names, self._held, strict=True)
            if id(held) not in present
        ]
        if gone and any(trained for key, trained in present.items() if key not in self._known):
            return gone[0]
        self._note_modules(model)
        return None

    def problem(self) -> str | None:
        """What happened to the first entry that is another one now, in words."""
        now = list(map(dict.get, self._modules, self._keys))
        if all(map(is_, now, self._held)):
            name = self._taken_out()
            how = "assigning another module in its place, `model.head = nn.Linear(...)`, does that"
            return None if name is None else f"{name} is in the model no more; {how}"
        model = self._model()
        present = {id(parameter) for parameter in (() if model is None else model.parameters())}
        for name, found, held in zip(self._names, now, self._held, strict=True):
            if found is held or (
                found is None and id(held) in present
            ):  # parametrizations move a parameter, and keep it
                continue
            what = "was taken out of its module" if found is None else "is another Parameter now"
            return (
                f"{name} {what}; load_state_dict(assign=True) and `module.weight = "
                "nn.Parameter(...)` do that"
            )
        return None


class InPlace:
    """All that `who` has put somewhere: parameters of `model` in `flats`, and those that it only
    refers to.

    Args:
        fix: What to do instead, an end of a sentence.
    """

    def __init__(
        self,
        who: str,
        model: nn.Module,
        flats: Sequence[Flat],
        *,
        others: Iterable[nn.Parameter] = (),
        fix: str,
    ) -> None:
        self._who, self._fix, self._places = who, fix, [Places(flat) for flat in flats]
        self._entries = Entries(model, [*(p for flat in flats for p in flat.parameters), *others])

    def problem(self) -> ValueError | None:
        """None where everything is where it was put; else what to raise."""
        found = self._entries.problem()
        for places in self._places if found is None else ():
            found = places.problem()
            if found is not None:
                break
        if found is None:
            return None
        return ValueError(
            f"{self._who}: {found}. {self._who} would train what the model does not "
            "compute with: move, cast, load or replace "
            f"parameters first and make {self._who} afterwards; {self._fix}"
        )


# Which parameters are in whose flat tensors. Neither side is kept alive by it, and an owner lets go
# of its own.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(parameters: Iterable[nn.Parameter], owner: object, *, who: str) -> None:
    """Note that these are in flat tensors of `owner`, until it is gone or lets go of them.

    Args:
        parameters: What the owner trains.
        owner: The object that owns them from now on.
        who: Its name, for the error of another one.
    """
    for parameter in parameters:
        _owners[parameter] = (ref(owner), who)


def release(parameters: Iterable[nn.Parameter], owner: object) -> None:
    """Let others have them."""
    for parameter in parameters:
        if parameter in _owners and _owners[parameter][0]() is owner:
            del _owners[parameter]


def owner_of(parameter: nn.Parameter) -> object | None:
    """The object in whose flat tensors a parameter is; None: nobody's."""
    found = _owners.get(parameter)
    return None if found is None else found[0]()


def check_free(named: Iterable[tuple[str, nn.Parameter]], *, who: str) -> None:
    """ValueError, naming the owner, for a parameter that is in another's flat tensors."""
    for name, parameter in named:
        found = _owners.get(parameter)
        if found is not None and found[0]() is not None:
            raise ValueError(
                f"{who}: {name} belongs to {_a(found[1])}, whose buffers and hooks would "
                "be left behind; use that one, or call "
                f"its close() before you make {_a(who)} of the same module; where nobody "
                "has it any more, make the module anew"
            )


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


class Watch:
    """Called before a step of the parameter over a whole flat tensor: what to raise where what
    should follow it does not.

    It does not keep the tensor alive, and a copy of the parameter, which is of no buffer, is not
    watched.

    look: what a strategy that has the buffer looks for besides, first.
    """

    def __init__(self, places: Places | None = None) -> None:
        self._places = places
        self.look: Callable[[], ValueError | None] | None = None

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()

    def __call__(self) -> ValueError | None:
        if self._places is None or torch.compiler.is_compiling():
            return None
        if self.look is not None and (error := self.look()) is not None:
            return error
        found = self._places.problem()
        return (
            None
            if found is None
            else ValueError(
                f"FlatBuffer: {found}. A step of FlatBuffer.parameter would not reach "
                "the model: move, cast or load parameters "
                "first, make the FlatBuffer and its optimizer afterwards"
            )
        )


def watches_of(groups: Iterable[Mapping[str, Any]]) -> list[Watch]:
    """Those of the parameters in an optimizer's groups that are over a whole flat tensor."""
    return [p.flat_watch for group in groups for p in group["params"] if hasattr(p, "flat_watch")]


def check_watches(
    watches: Iterable[Watch], *, refuse: Callable[[Exception], None] | None = None
) -> None:
    """ValueError for the first one that finds something.

    Args:
        refuse: Raises it, and tells other ranks.
    """
    for watch in watches:
        error = watch()
        if error is not None:
            (refuse or _raise)(error)


def _raise(error: Exception) -> None:
    raise error
