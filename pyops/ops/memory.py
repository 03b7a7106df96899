"""What an op refuses, whichever kernel answers: tensors beyond their memory, and views that are
still to be computed.

    emptied or shortened storage     C++ looks at each tensor as it arrives (csrc/host/box.h);
                                     Triton and plain torch ask here
    negative or conjugate view       the dispatcher brings them here: computed where the op only
                                     reads, refused where it writes
    meta beside real tensors         the dispatcher takes the fake of an op then, which asks here

All of it costs an ordinary call nothing but the look at each storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "VIEWS",
    "check_kinds",
    "check_memory",
    "memory_problem",
    "require_memory",
    "resolved_view",
    "resolving",
]

VIEWS = ("Negative", "Conjugate", "ZeroTensor")  # keys of the dispatcher


def memory_problem(tensor: Tensor) -> str | None:
    """What a tensor lacks that has elements and no memory for all of them, or None. Only for
    strided tensors with a storage."""
    if not (numel := tensor.numel()):
        return None
    offset = tensor.storage_offset()
    if tensor.is_contiguous():
        elements = offset + numel
    else:
        elements = (
            offset
            + 1
            + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
    needed, held = elements * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed <= held and tensor.data_ptr():
        return None
    return (
        f"has elements but no memory for them: its shape {list(tensor.shape)} from "
        f"element {offset} on needs {needed} bytes, "
        f"its storage has {held if tensor.data_ptr() else 0}; it was resized or given "
        "back (resize_), allocate it before the "
        "call"
    )


def require_memory(tensor: Tensor, what: str) -> None:
    """ValueError for a strided tensor that has elements and no memory for them, or that is on
    meta."""
    if tensor.is_meta and tensor.numel():
        raise ValueError(
            f"{what} is on meta and has no numbers; give it memory (to_empty) and fill "
            "it before the call"
        )
    if (problem := memory_problem(tensor)) is not None:
        raise ValueError(f"{what} {problem}")


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among an op's arguments, with its place."""
    for place, argument in [*((str(i + 1), a) for i, a in enumerate(args)), *kwargs.items()]:
        if isinstance(argument, Tensor):
            yield place, argument
        elif isinstance(argument, list | tuple):
            yield from (
                (f"{place}[{i}]", t) for i, t in enumerate(argument) if isinstance(t, Tensor)
            )


def check_memory(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, told of no tensor that reaches beyond its memory."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for place, tensor in _tensors(args, kwargs):
            if tensor.layout != torch.strided:
                raise TypeError(
                    f"pyops::{name}: argument {place} has layout {tensor.layout}; pass "
                    "it dense, as to_dense() gives it"
                )
            if (problem := memory_problem(tensor)) is not None:
                raise RuntimeError(f"pyops::{name}: argument {place} {problem}")
        return function(*args, **kwargs)

    return checked


def check_kinds(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, which answers for tensors on meta, told of no others beside them."""

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        kinds: dict[str, str] = {}
        for place, tensor in _tensors(args, kwargs):
            kinds.setdefault(tensor.device.type, place)
        if "meta" in kinds and len(kinds) > 1:
            where = ", ".join(f"argument {place} is on {kind}" for kind, place in kinds.items())
            raise RuntimeError(
                f"pyops::{name}: {where}; a tensor on meta has no numbers, so give it "
                "memory (to_empty) or all none"
            )
        return fake(*args, **kwargs)

    return checked


def resolved_view(tensor: Tensor) -> Tensor:
    """The tensor with its sign or conjugate taken: itself where there is nothing to do."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg().resolve_conj()


def resolving(op: Any, *, keeps_addresses: bool) -> Callable[..., Any]:
    """What answers for `op` where an operand is a view that is still to be computed.

    torch's own answer, for an op that writes into its arguments and returns nothing, writes into
    copies and drops them.
    """
    name, arguments = op._schema.name, op._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    written |= {"table"} | (
        {a.name for a in arguments} if keeps_addresses else set()
    )  # of a table's addresses, too

    def one(tensor: Any, argument: str) -> Any:
        if not isinstance(tensor, Tensor) or (plain := resolved_view(tensor)) is tensor:
            return tensor
        if argument.split("[")[0] in written:
            raise ValueError(
                f"{name}: {argument} is a view whose sign, conjugate or zeros are still "
                "to be computed (torch._neg_view, "
                "conj().imag), and the op works on its memory itself; pass "
                "resolve_neg().resolve_conj() of it"
            )
        return plain

    def each(value: Any, argument: str) -> Any:
        if isinstance(value, list | tuple):
            return [one(v, f"{argument}[{i}]") for i, v in enumerate(value)]
        return one(value, argument)

    def resolve(*args: Any, **kwargs: Any) -> Any:
        plain = [
            each(value, argument.name) for value, argument in zip(args, arguments, strict=False)
        ]
        return op(*plain, **{key: each(value, key) for key, value in kwargs.items()})

    return resolve
