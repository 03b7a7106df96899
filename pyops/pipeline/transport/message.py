"""Message: any value that stages give each other as one run of bytes that tells its own shape;
taken apart and put together.

    flags | bytes in all | bytes of the shape | packed at, ns | shape, as JSON | tensors, each from
      8          8                 8                  8                          a multiple of 64

    x [2, 3] float32              ["tensor", "float32", [2, 3], true]     true: requires a gradient
    (x, {"n": 3, "mask": None})   ["tuple", [[..], ["dict", ["n", "mask"],
                                                            [["plain", 3], ["plain", null]]]]]

A receiver need not know what comes: shapes may change from one micro-batch to the next. What is
received are views of the bytes of the message.
"""

from __future__ import annotations

import json
import math
import struct
import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyops.ops.memory import require_memory

__all__ = [
    "HEADER",
    "Header",
    "MessageLayout",
    "empty_tensors",
    "lay_out",
    "pack",
    "restore",
    "to_device",
    "unpack",
]

HEADER = struct.Struct("<4q")
ALIGNMENT = 64
PLAIN = (bool, int, float, str)

Header = tuple[int, int, int, int]  # flags, payload bytes, shape bytes, nanoseconds


class MessageLayout:
    """A value taken apart: `shape` is JSON, as bytes, `tensors` are in its order, `offsets` are the
    first byte of each tensor in a message, and `end` is the size of the message in bytes."""

    __slots__ = ("end", "offsets", "shape", "tensors")

    def __init__(self, shape: bytes, tensors: list[Tensor]) -> None:
        self.shape, self.tensors = shape, tensors
        self.offsets = []
        at = HEADER.size + len(shape)
        for tensor in tensors:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            self.offsets.append(at)
            at += tensor.numel() * tensor.element_size()
        self.end = at


def lay_out(value: Any, *, what: str) -> MessageLayout:
    """Take a value apart.

    Args:
        value: Tensors, numbers, strings, None, and tuples, lists and dicts of them.
        what: Its name in errors.

    Raises:
        TypeError: It has something that can't be sent.
        ValueError: It has a tensor without memory.
    """
    if type(value) is Tensor and value.layout == torch.strided:  # the usual case, and the fast one
        require_memory(value, what)
        return MessageLayout(_shape_of_one(value.dtype, value.shape, value.requires_grad), [value])
    tensors: list[Tensor] = []
    return MessageLayout(json.dumps(_flatten(value, tensors, what)).encode(), tensors)


def pack(layout: MessageLayout, *, num_bytes: int | None = None, flags: int = 0) -> Tensor:
    """The message (1-D uint8 on the CPU) of `num_bytes` bytes, by default as many as it needs."""
    message = torch.empty(
        layout.end if num_bytes is None else num_bytes, dtype=torch.uint8, device="cpu"
    )
    shape, view = layout.shape, message.numpy().data
    HEADER.pack_into(view, 0, flags, layout.end, len(shape), time.monotonic_ns())
    view[HEADER.size : HEADER.size + len(shape)] = shape
    for tensor, at in zip(layout.tensors, layout.offsets, strict=True):
        if tensor.numel():
            message[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(
                tensor.detach()
            )
    return message


def restore(shape: bytes, tensors: list[Tensor]) -> Any:
    """The value of a shape and its tensors; those that require a gradient are made leaves."""
    return _unflatten(_parsed(shape), iter(tensors))


def empty_tensors(shape: bytes, device: torch.device) -> list[Tensor]:
    """Uninitialized tensors like those of a shape, to receive them apart from it."""
    return [
        torch.empty(sizes, dtype=dtype, device=device) for dtype, sizes, _, _ in _tensors_of(shape)
    ]


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on a device; those that require a gradient are leaves there."""
    return tree_map(
        lambda t: (
            t.detach().to(device).requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        ),
        value,
    )


def unpack(message: Tensor, view: memoryview, header: Header) -> Any:
    """The value in a message (1-D uint8, of which `view` is a view), whose tensors are views of
    it."""
    shape = bytes(view[HEADER.size : HEADER.size + header[2]])
    tensors, at = [], HEADER.size + header[2]
    for dtype, sizes, numel, nbytes in _tensors_of(shape):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        # torch can't view an empty run of bytes as another dtype, so empty tensors are made anew.
        tensors.append(
            message[at : at + nbytes].view(dtype).view(sizes)
            if numel
            else torch.empty(sizes, dtype=dtype, device="cpu")
        )
        at += nbytes
    return restore(shape, tensors)


@lru_cache(maxsize=4096)
def _shape_of_one(dtype: torch.dtype, sizes: torch.Size, requires_grad: bool) -> bytes:
    return json.dumps(
        ["tensor", str(dtype).removeprefix("torch."), list(sizes), requires_grad]
    ).encode()


def _flatten(value: Any, tensors: list[Tensor], what: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(
                f"{what} has a tensor of layout {value.layout}, which can't be sent; "
                "return a strided one"
            )
        require_memory(value, f"{what} has a tensor that")
        tensors.append(value)
        return [
            "tensor",
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            value.requires_grad,
        ]
    if value is None or isinstance(value, PLAIN):
        return ["plain", value]
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return [type(value).__name__, [_flatten(each, tensors, what) for each in value]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", list(value), [_flatten(each, tensors, what) for each in value.values()]]
    raise TypeError(
        f"{what} has a {type(value).__name__}, which can't be sent to another stage; "
        "return tensors, numbers, strings, None, "
        "or tuples, lists and dicts (with names as keys) of them"
    )


@lru_cache(maxsize=4096)
def _parsed(shape: bytes) -> Any:
    return json.loads(shape)


@lru_cache(maxsize=4096)
def _tensors_of(shape: bytes) -> tuple[tuple[torch.dtype, list[int], int, int], ...]:
    """(dtype, sizes, elements, bytes) of every tensor in a shape."""
    found: list[tuple[torch.dtype, list[int], int, int]] = []

    def walk(node: Any) -> None:
        if node[0] == "tensor":
            dtype, numel = getattr(torch, node[1]), math.prod(node[2])
            found.append((dtype, node[2], numel, numel * dtype.itemsize))
        elif node[0] != "plain":
            for each in node[-1]:
                walk(each)

    walk(_parsed(shape))
    return tuple(found)


def _unflatten(node: Any, tensors: Any) -> Any:
    kind = node[0]
    if kind == "tensor":
        tensor = next(tensors)
        return tensor.requires_grad_() if node[3] else tensor
    if kind == "plain":
        return node[1]
    several = [_unflatten(each, tensors) for each in node[-1]]
    if kind == "dict":
        return dict(zip(node[1], several, strict=True))
    return tuple(several) if kind == "tuple" else several
