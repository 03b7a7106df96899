"""All parameters of one dtype in one aligned tensor, all their gradients in another, and views handed out.

    registration order        embed.weight   block.0.weight   block.0.bias   head.weight
    buffer (backward order)   | head.weight |pad| block.0.bias |pad| block.0.weight | embed.weight |pad to multiple_of|
                                ^ offset 0, ready first in backward                                 ^ ready last

Every offset is a multiple of ALIGNMENT elements, so that kernels read whole vectors. Padding is zero and stays zero: its
gradient is zero. A bucket of a collective, and the shard that an optimizer steps, is a slice of the buffer: nothing is
copied in or out.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

__all__ = ["ALIGNMENT", "FlatBuffer", "FlatLayout", "Shard", "Shards"]

ALIGNMENT = 64  # elements: 256 bytes of fp32, 128 of bf16; at least a cache line of either


@dataclass(frozen=True)
class FlatLayout:
    """Which tensor lies where in a flat buffer; pure arithmetic.

    names, shapes, offsets: one entry per tensor, offsets in elements, increasing.
    numel: elements of the buffer, padding included.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def plan(
        cls, tensors: Sequence[tuple[str, Sequence[int]]], *, alignment: int = ALIGNMENT, multiple_of: int = 1
    ) -> FlatLayout:
        """Lay the (name, shape) pairs one after the other, in the order given.

        alignment: every offset is a multiple of it. multiple_of: so is the buffer's length (the number of ranks, for shards
        of one size). ValueError for a repeated name or for numbers below 1.
        """
        names = tuple(name for name, _ in tensors)
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"names must differ, but these repeat: {repeated}; give each tensor its own name")
        if alignment < 1 or multiple_of < 1:
            raise ValueError(f"alignment and multiple_of must be at least 1, got {alignment} and {multiple_of}")
        shapes = tuple(tuple(int(n) for n in shape) for _, shape in tensors)
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(-(-end // alignment) * alignment)
            end = offsets[-1] + prod(shape)
        return cls(names, shapes, tuple(offsets), -(-end // multiple_of) * multiple_of)

    def slice(self, name: str) -> builtins.slice:
        """Where the tensor's elements are in the buffer. KeyError names the tensors there are."""
        if name not in self.names:
            raise KeyError(f"no tensor {name!r} in this layout; it has {list(self.names)}")
        return self.slice_at(self.names.index(name))

    def slice_at(self, index: int) -> builtins.slice:
        """As `slice`, by the tensor's position."""
        start = self.offsets[index]
        return builtins.slice(start, start + prod(self.shapes[index]))

    def shards(self, start: int, stop: int) -> list[tuple[str, builtins.slice, builtins.slice]]:
        """The parts of tensors within [start, stop): (name, slice of the flattened tensor, slice of the buffer)."""
        found = []
        for index, name in enumerate(self.names):
            whole = self.slice_at(index)
            low, high = max(start, whole.start), min(stop, whole.stop)
            if low < high:
                found.append((name, builtins.slice(low - whole.start, high - whole.start), builtins.slice(low, high)))
        return found

    def cut(self, local: Tensor, ranges: Sequence[tuple[int, int]]) -> dict[str, Shards]:
        """The tensors' parts within `local`, which holds these ranges [start, stop) of the buffer one after the other.

        Views of `local`; a tensor with nothing there has no entry, one without elements an empty part. ValueError unless
        `local` is of one dim and exactly as long as the ranges, which must lie within the buffer, in order.
        """
        ends = [0, *(n for pair in ranges for n in pair), self.numel]
        length = sum(stop - start for start, stop in ranges)
        if sorted(ends) != ends or tuple(local.shape) != (length,):
            raise ValueError(
                f"a tensor of shape {tuple(local.shape)} can't hold the ranges {list(ranges)} of a buffer of {self.numel} "
                f"elements; expected ranges in increasing order, and shape ({length},)"
            )
        joined: list[list[int]] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                joined[-1][1] = stop
            else:
                joined.append([start, stop])
        empty = {name: shape for name, shape in zip(self.names, self.shapes, strict=True) if not prod(shape)}
        found: dict[str, list[Shard]] = {name: [Shard(shape, (0,), local[:0])] for name, shape in empty.items()}
        begin = 0
        for start, stop in joined:
            for name, part, place in self.shards(start, stop):
                here = local[begin + place.start - start : begin + place.stop - start]
                found.setdefault(name, []).append(Shard(self.shapes[self._index[name]], (part.start,), here))
            begin += stop - start
        return {name: Shards(tuple(parts)) for name, parts in found.items()}

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


@dataclass(frozen=True)
class Shard:
    """A part of a larger tensor, as checkpoints store it: `tensor` begins at `offset` of the whole, in one of two forms.

    box     offset has one number per dim                                     Shard((4, 6), (2, 0), tensor [2, 6])
    range   offset has one number and `tensor` one dim, whatever the whole    Shard((4, 6), (9,), tensor [5])
            has: elements [offset, offset + n) of the flattened, row-major whole

    ValueError for a part that does not lie within the whole.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def is_range(self) -> bool:
        """Whether this is a range of the flattened tensor. A box of one dim is one too."""
        return len(self.offset) == self.tensor.dim() == 1

    def __post_init__(self) -> None:
        whole = (prod(self.global_shape),) if self.is_range else self.global_shape
        fits = len(whole) == len(self.offset) == self.tensor.dim()
        ends = [o + n for o, n in zip(self.offset, self.tensor.shape, strict=False)]
        if not fits or any(o < 0 for o in self.offset) or any(e > n for e, n in zip(ends, whole, strict=True)):
            raise ValueError(
                f"a shard of shape {tuple(self.tensor.shape)} at offset {self.offset} does not lie within {self.global_shape}; "
                "offset needs one number per dim, or one number and a tensor of one dim for a range of the flattened whole"
            )


@dataclass(frozen=True)
class Shards:
    """Several parts of one tensor on one rank, which owns a chunk of each of several buckets; may be none at all.

    ValueError for parts of tensors that differ in shape or dtype.
    """

    parts: tuple[Shard, ...]

    def __post_init__(self) -> None:
        kinds = {(tuple(part.global_shape), part.tensor.dtype) for part in self.parts}
        if len(kinds) > 1:
            raise ValueError(f"Shards are parts of one tensor, but these are of {sorted(map(str, kinds))}; make one for each")

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def _check(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """ValueError or TypeError, before anything is changed, for parameters that can't share a buffer."""
    if not named:
        raise ValueError("FlatBuffer needs at least one parameter, got none")
    first_name, first = named[0]
    seen: dict[int, str] = {}
    for name, parameter in named:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"{name} is a {type(parameter).__name__}; expected an nn.Parameter")
        if id(parameter) in seen:
            raise ValueError(f"{name} is the same parameter as {seen[id(parameter)]}; pass a shared parameter once")
        seen[id(parameter)] = name
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}, {first_name} is {first.dtype} on {first.device}; "
                "make one FlatBuffer per dtype and device"
            )
        if parameter.layout != torch.strided or not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(f"{name} is {parameter.dtype}, {parameter.layout}; expected a dense floating-point parameter")


class FlatBuffer:
    """Parameters and gradients of one dtype and device, laid out in backward order; each parameter becomes a view.

    named_parameters: (name, parameter) in registration order, as `module.named_parameters()` gives them; the buffer holds them
    in reverse. A non-contiguous parameter keeps its values and becomes contiguous. multiple_of: the buffer's length is
    a multiple of it.

    layout      the FlatLayout
    data, grad  the flat tensors; parameter.data and parameter.grad are views of them
    parameter   an nn.Parameter over `data` whose .grad is `grad`: give it to an optimizer in place of the many. Its
                attribute `flat_layout` is the layout, by which LAMB, LARS and Adafactor know their layers
    names, parameters, grad_views   in the buffer's order

    Don't move the module or assign new data to its parameters afterwards; load_state_dict is fine. A gradient that was set
    to None is put back by `restore_gradient`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, multiple_of: int = 1) -> None:
        named = list(named_parameters)
        _check(named)
        named.reverse()
        self.layout = FlatLayout.plan([(name, p.shape) for name, p in named], multiple_of=multiple_of)
        self.names = self.layout.names
        self.parameters = [p for _, p in named]
        like = self.parameters[0]
        self.data = torch.zeros(self.layout.numel, dtype=like.dtype, device=like.device)
        self.grad = torch.zeros_like(self.data)
        self.grad_views: list[Tensor] = []
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                where, shape = self.layout.slice_at(index), self.layout.shapes[index]
                grad_view, before = self.grad[where].view(shape), parameter.grad
                self.data[where].view(shape).copy_(parameter)
                if before is not None:
                    grad_view.copy_(before)
                parameter.grad = None  # a gradient of other strides would keep .data from being set
                parameter.data = self.data[where].view(shape)
                parameter.grad = grad_view
                self.grad_views.append(grad_view)
        self.parameter = nn.Parameter(self.data, requires_grad=True)
        self.parameter.grad = self.grad
        self.parameter.flat_layout = self.layout  # type: ignore[attr-defined]  # for optimizers that go by layers
        self._index = {id(p): i for i, p in enumerate(self.parameters)}

    def __len__(self) -> int:
        return len(self.parameters)

    def index(self, parameter: nn.Parameter) -> int:
        """The parameter's position in the buffer."""
        if id(parameter) not in self._index:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not in this buffer, which holds {self.names}")
        return self._index[id(parameter)]

    def zero_grad(self) -> None:
        """Zero all gradients in one pass and make every parameter.grad its view again."""
        self.grad.zero_()
        for parameter, view in zip(self.parameters, self.grad_views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    @torch.no_grad()
    def restore_gradient(self, index: int) -> bool:
        """Make the parameter's .grad the view again, with the values it had; says whether there was a gradient.

        A .grad of None leaves zeros in the view. After the call, the flat gradient is exact at this parameter.
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
