"""Masks: which weights of a model are alive, one bit for each.

    alive      1 0 0 1 1 0 0 0   0 1 ...      of a parameter, in row-major order
    bits       0b00011001        0b......10   byte i holds elements 8 i to 8 i + 7, the lowest bit
                                              first; bits beyond the last element are 0

A mask is of the tensor that this rank's model has: under tensor parallelism its part of the whole
one, under every stage of ZeRO all of it, an eighth of a byte for each weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement

__all__ = ["Mask", "Masks", "masks_of", "pack_bits", "unpack_bits"]

OWNER = "pruning_masks"  # see pyops.protocols.PrunedParameter


def pack_bits(alive: Tensor) -> Tensor:
    """One bit for each element, in row-major order.

    Args:
        alive: bool, of any shape.

    Returns:
        uint8 [ceil(n / 8)] on its device; element i is bit i % 8 of byte i // 8.
    """
    flat = alive.reshape(-1).to(torch.uint8)
    short = -flat.numel() % 8
    if short:
        flat = torch.cat([flat, flat.new_zeros(short)])
    places = torch.arange(8, dtype=torch.uint8, device=flat.device)
    return (flat.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, numel: int, *, start: int = 0) -> Tensor:
    """The inverse of `pack_bits`, of a stretch.

    Args:
        bits: uint8, as `pack_bits` gives them.
        numel: How many elements.
        start: The first of them.

    Returns:
        bool [numel].
    """
    first, last = start // 8, -(-(start + numel) // 8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    found = (bits[first:last, None] >> places) & 1
    return found.view(-1)[start - 8 * first :][:numel].bool()


@dataclass(frozen=True, eq=False)
class Mask:
    """Which elements of a tensor are alive.

    Attributes:
        shape: Of the tensor.
        bits: uint8 [ceil(n / 8)], as `pack_bits` gives them.
    """

    shape: tuple[int, ...]
    bits: Tensor

    def __post_init__(self) -> None:
        size = -(-self.numel // 8)
        if self.bits.dtype != torch.uint8 or tuple(self.bits.shape) != (size,):
            raise ValueError(
                f"the mask of a tensor of {self.shape} has {self.numel} bits, uint8 ({size},); got "
                f"{self.bits.dtype} {tuple(self.bits.shape)}: give what pack_bits returns"
            )

    @classmethod
    def of(cls, alive: Tensor) -> Mask:
        """From a bool tensor of the shape of what is masked."""
        if alive.dtype != torch.bool:
            raise TypeError(f"alive is {alive.dtype}; give a bool tensor: True for what is kept")
        return cls(tuple(alive.shape), pack_bits(alive))

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @cached_property
    def kept(self) -> int:
        """How many of them are alive."""
        return int(unpack_bits(self.bits, self.numel).sum())

    def alive(self) -> Tensor:
        """bool, of the tensor's shape."""
        return unpack_bits(self.bits, self.numel).view(self.shape)

    def part(self, start: int, stop: int) -> Tensor:
        """Bits of elements [start, stop) of the flattened tensor, from a byte's first bit on."""
        if start % 8 == 0 and stop == self.numel:
            return self.bits[start // 8 :]
        return pack_bits(unpack_bits(self.bits, stop - start, start=start))

    @torch.no_grad()
    def apply_(self, tensor: Tensor) -> Tensor:
        """Set what is not alive to +0, also where it is not finite; returns the tensor."""
        return tensor.masked_fill_(~self.alive().to(tensor.device), 0.0)


class Masks(Mapping[str, Mask]):
    """The masks of some of a model's parameters, by name; a weight that is not alive is 0.

    Whoever trains the model keeps it so by `pyops.pruning.hold`. A parameter has the masks of one
    owner only, until `release`.

    Args:
        model: What has the parameters.
        alive: {name of a parameter: bool tensor of its shape, or a Mask}. A tied parameter may
            stand under several names if the masks are the same.

    Attributes:
        model: The model.

    Raises:
        ValueError: Before anything is changed: for names or shapes that the model does not have,
            parameters that are frozen, quantized, or have masks of another owner, and tied
            parameters with different masks.
    """

    def __init__(self, model: nn.Module, alive: Mapping[str, Tensor | Mask]) -> None:
        self.model = model
        self._observers: list[Callable[[], None]] = []
        self._masks = Masks.checked(model, alive)
        named = dict(model.named_parameters())
        self._parameters = {name: named[name] for name in self._masks}
        for parameter in self._parameters.values():
            setattr(parameter, OWNER, self)
        self.apply_()

    @staticmethod
    def checked(model: nn.Module, alive: Mapping[str, Tensor | Mask]) -> dict[str, Mask]:
        """The masks under the parameters' first names; raises what making `Masks` of them would."""
        named = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, parameter in named.items():
            first.setdefault(id(parameter), name)
        found: dict[str, Mask] = {}
        for name, given in alive.items():
            _check_parameter(name, named)
            mask = given if isinstance(given, Mask) else Mask.of(given)
            under = first[id(named[name])]
            _check_mask(name, named[name], mask, found.get(under))
            found[under] = mask
        return found

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a pickled parameter has no masks; checkpoints have them

    def __getitem__(self, name: str) -> Mask:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name."""
        return self._parameters[name]

    @property
    def layout(self) -> str:
        """A hash of the names and whole shapes: alike for every layout of the same parameters."""
        return layout_hash({name: whole_shape(self, name) for name in sorted(self)})

    @property
    def sparsity(self) -> float:
        """The share of this rank's masked parameters that is not alive."""
        numel = sum(mask.numel for mask in self.values())
        return 1.0 - sum(mask.kept for mask in self.values()) / max(numel, 1)

    def observe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` whenever the masks are others; what is returned ends that."""
        self._observers.append(changed)
        return lambda: self._observers.remove(changed)

    def update(self, alive: Mapping[str, Tensor | Mask]) -> None:
        """Take other masks of the same parameters, or of some of them, and set what is pruned to 0.

        Raises:
            ValueError: For names without a mask here and for other shapes; nothing is changed.
        """
        masks = {n: g if isinstance(g, Mask) else Mask.of(g) for n, g in alive.items()}
        for name, mask in masks.items():
            if name not in self._masks:
                raise ValueError(f"{name} has no mask here; those are of {', '.join(self)}")
            _check_mask(name, self._parameters[name], mask, None)
        self._masks.update(masks)
        self.apply_()
        for changed in list(self._observers):
            changed()

    def apply_(self) -> None:
        """Set every weight that is not alive to 0, in the parameters that have memory."""
        for name, mask in self._masks.items():
            parameter = self._parameters[name]
            if not parameter.is_meta and parameter.untyped_storage().nbytes():
                mask.apply_(parameter.data)

    def release(self) -> None:
        """Let others mask the parameters. The weights stay as they are."""
        for parameter in self._parameters.values():
            if getattr(parameter, OWNER, None) is self:
                delattr(parameter, OWNER)


def masks_of(model: nn.Module) -> dict[str, Mask]:
    """{name: Mask} of all parameters of a model that have one, whoever made it."""
    found: dict[str, Mask] = {}
    for name, parameter in model.named_parameters():
        owner = getattr(parameter, OWNER, None)
        if owner is not None:
            of_owner = next(n for n in owner if owner.parameter(n) is parameter)
            found[name] = owner[of_owner]
    return found


def whole_shape(masks: Masks, name: str) -> tuple[int, ...]:
    """The shape of the parameter that all ranks have together."""
    placement = Placement.of(masks.model).get(name)
    return masks[name].shape if placement is None else tuple(placement.global_shape)


def layout_hash(shapes: Mapping[str, Iterable[int]]) -> str:
    """A hash of names and shapes, in the order of the names."""
    text = ";".join(f"{name}:{tuple(shapes[name])}" for name in sorted(shapes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_parameter(name: str, named: Mapping[str, Any]) -> None:
    parameter = named.get(name)
    if parameter is None:
        raise ValueError(
            f"the model has no parameter {name!r}; it has {', '.join(list(named)[:6])} "
            f"({len(named)} in all)"
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"{name} is {parameter.dtype}: prune a model first, then calibrate and quantize it"
        )
    if not parameter.requires_grad:
        raise ValueError(
            f"{name} is frozen (requires_grad=False), and pruning would change it; leave it out"
        )
    if getattr(parameter, OWNER, None) is not None:
        raise ValueError(
            f"{name} has masks of another owner already; call release() of those first, or "
            "update() them"
        )


def _check_mask(name: str, parameter: Tensor, mask: Mask, other: Mask | None) -> None:
    if mask.shape != tuple(parameter.shape):
        raise ValueError(
            f"the mask of {name} is of shape {mask.shape}, the parameter of "
            f"{tuple(parameter.shape)}; give one bit for each of its elements"
        )
    if other is not None and not torch.equal(other.bits, mask.bits):
        raise ValueError(
            f"{name} is tied to another name with another mask; a shared parameter has one mask"
        )
