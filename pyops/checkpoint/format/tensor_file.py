"""Safetensors files with a checksum of every block: written in one pass, read in pieces that are
compared first.

    | u64 | JSON header, padded | tensor | tensor | tensor ... |
    | block 0: crc32 | block 1: crc32 | block 2: crc32 | ...   |   a MiB each, more in files of more
                                                                   than 4 GiB

A reader of a few rows reads and compares the blocks in which they lie, and nothing else of the
file. CRC-32 finds every flip of up to 32 bits in a row; it is no signature, and cryptographic
hashes would take three times as long as writing.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyops.flat import TensorElsewhere
from pyops.ops.memory import memory_problem

__all__ = ["DTYPES", "Content", "Entry", "TensorFile", "bytes_of", "check_dtypes", "write_tensors"]

Content = Tensor | TensorElsewhere
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 1 << 20
MAX_BLOCKS = 4096  # of a file, before blocks grow: their checksums stand in the manifest
MAX_HEADER = 100_000_000  # bytes; the safetensors package refuses more
PIECE = 4 << 20  # bytes that are written or compared at a time


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file: bytes [start, stop) of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def check_dtypes(tensors: Mapping[str, Content], *, what: str = "state") -> None:
    """TypeError naming a tensor that a file can't hold, or that has lost its memory."""
    for name, tensor in tensors.items():
        kind: Any = "unread"
        if isinstance(tensor, Tensor):
            kind = "meta" if tensor.is_meta else tensor.layout
        if tensor.dtype not in NAMES or kind not in (torch.strided, "unread"):
            raise TypeError(
                f"{what}[{name!r}] is a {tensor.dtype}, {kind} tensor, which a "
                "checkpoint can't hold: convert it"
            )
        if isinstance(tensor, Tensor) and (problem := memory_problem(tensor)) is not None:
            raise TypeError(f"{what}[{name!r}] {problem}")


class _Checksums:
    """The checksums of a file's blocks, of bytes that come in any pieces."""

    def __init__(self, block: int) -> None:
        self.block, self.found = block, list[int]()
        self._crc = self._filled = 0

    def add(self, piece: memoryview) -> None:
        at = 0
        while at < len(piece):
            n = min(self.block - self._filled, len(piece) - at)
            self._crc, self._filled, at = (
                zlib.crc32(piece[at : at + n], self._crc),
                self._filled + n,
                at + n,
            )
            if self._filled == self.block:
                self.end()

    def end(self) -> None:
        if self._filled:
            self.found.append(self._crc)
        self._crc = self._filled = 0


def _header(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The length and the JSON of a file whose tensors lie in this order."""
    told: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers asks for
    end = 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        told[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: Path, tensors: Mapping[str, Content], *, in_order: bool = False
) -> dict[str, Any]:
    """Write and flush to the disk; {"bytes": size, "block": bytes of a block, "crc32": [of each
    block]}.

    Args:
        tensors: On any device, of any strides; or what has `shape`, `dtype` and `read()`, a tensor
            that is made or read when its turn comes. One at a time is copied where it is not
            contiguous memory already.
        in_order: They lie, and are read, in the order given; otherwise by the size of their
            elements.

    Raises:
        TypeError: For a dtype that a file can't hold, before the file is made.
        OSError.
    """
    check_dtypes(tensors)
    # Wide elements first, so that every tensor lies at a multiple of its element's size.
    order = (
        list(tensors)
        if in_order
        else sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    )
    header = _header({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in order})
    size = len(header) + sum(prod(t.shape) * t.dtype.itemsize for t in tensors.values())
    block = BLOCK
    while size > block * MAX_BLOCKS:
        block *= 2
    checksums = _Checksums(block)
    with open(path, "wb", buffering=0) as file:
        _put(file.fileno(), memoryview(header), checksums)
        for name in order:
            given = tensors[name]
            tensor = given if isinstance(given, Tensor) else given.read()
            # A negative view has the memory of what it is a view of.
            plain = tensor.detach().to("cpu").resolve_neg().contiguous()
            _put(file.fileno(), bytes_of(plain), checksums)
        checksums.end()
        os.fsync(file.fileno())
    return {"bytes": size, "block": block, "crc32": checksums.found}


def _put(descriptor: int, data: memoryview, checksums: _Checksums) -> None:
    for at in range(0, len(data), PIECE):
        piece = data[at : at + PIECE]
        checksums.add(piece)
        while len(piece):  # a write may be short
            piece = piece[os.write(descriptor, piece) :]


class TensorFile:
    """A file, read in pieces. Nothing stays open between two calls.

    entries: {name: Entry}. Raises OSError, and ValueError saying what is wrong, without the file's
    name.

    Args:
        expected: {"bytes", "block", "crc32": [...]} as `write_tensors` gave it; {"bytes", "crc32":
            one number} for a file that is one block; None for a file of which nothing is known,
            which is then compared with nothing.
    """

    def __init__(self, path: Path, expected: Mapping[str, Any] | None = None) -> None:
        self.path = path
        found = os.stat(path)  # before it is opened: opening a pipe would wait
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("is not a regular file")
        self.size, self._identity = found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns)
        self._crcs: list[int] | None = None
        self._compared: set[int] = set()
        if expected is not None:
            if self.size != expected["bytes"]:
                raise ValueError(f"has {self.size} bytes, {expected['bytes']} by the manifest")
            crcs = expected["crc32"]
            self._crcs = crcs if isinstance(crcs, list) else [crcs]
            self.block = expected["block"] if isinstance(crcs, list) else max(1, self.size)
        self.entries = self._parse()

    def _parse(self) -> dict[str, Entry]:
        prefix = bytearray(8)
        self.read(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER, self.size - 8):
            raise ValueError(f"is damaged: its header says that it is {length} bytes long")
        text = bytearray(length)
        self.read(8, memoryview(text))
        try:
            return _entries(json.loads(bytes(text)), first=8 + length, size=self.size)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"is damaged: its header makes no sense ({error})") from None

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino, found.st_mtime_ns) != self._identity:
            os.close(descriptor)
            raise ValueError("was replaced while it was read")
        return descriptor

    def compare(self, start: int, stop: int) -> None:
        """Compare the blocks of bytes [start, stop) with their checksums, each once.

        Raises:
            ValueError: Where they differ.
        """
        if self._crcs is None or start >= stop:
            return
        wanted = [
            b
            for b in range(start // self.block, (stop - 1) // self.block + 1)
            if b not in self._compared
        ]
        if not wanted:
            return
        scratch, descriptor = memoryview(bytearray(min(self.block, PIECE))), self._open()
        try:
            for number in wanted:
                crc, end = 0, min((number + 1) * self.block, self.size)
                for at in range(number * self.block, end, len(scratch)):
                    piece = scratch[: min(len(scratch), end - at)]
                    _fill(descriptor, at, piece)
                    crc = zlib.crc32(piece, crc)
                if crc != self._crcs[number]:
                    raise ValueError(
                        f"is damaged: the checksum of bytes {number * self.block} to "
                        f"{end} is not the manifest's"
                    )
                self._compared.add(number)
        finally:
            os.close(descriptor)

    def read(self, start: int, into: memoryview) -> None:
        """Bytes [start, start + len(into)), after comparing their blocks."""
        if start + len(into) > self.size:
            raise ValueError(f"has {self.size} bytes, which is too few")
        self.compare(start, start + len(into))
        descriptor = self._open()
        try:
            _fill(descriptor, start, into)
        finally:
            os.close(descriptor)


def _fill(descriptor: int, at: int, into: memoryview) -> None:
    while len(into):
        n = os.preadv(descriptor, [into], at)
        if n == 0:
            raise ValueError("ends too early")
        at, into = at + n, into[n:]


def _entries(told: Any, *, first: int, size: int) -> dict[str, Entry]:
    """The header's tensors; together they must be all of the file. Raises KeyError, TypeError,
    ValueError."""
    if not isinstance(told, dict):
        raise TypeError("it is no object")
    found = {}
    for name, entry in told.items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in [*shape, start, stop]):
            raise ValueError(f"{name!r} has a shape or place that is not made of whole numbers")
        if stop - start != prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{name!r} has {stop - start} bytes, which are not {shape} of {entry['dtype']}"
            )
        found[name] = Entry(dtype, tuple(shape), first + start, first + stop)
    end = first
    for entry in sorted(found.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            raise ValueError("its tensors overlap, or leave gaps")
        end = entry.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return found
