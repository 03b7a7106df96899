"""Safetensors files with a checksum: written by the safetensors package, flushed to the disk, compared before they are read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["DTYPES", "checksum", "read_tensors", "write_tensors"]

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
CHUNK = 16 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write and flush to the disk; {"bytes": size, "crc32": checksum} of the file. Raises TypeError, OSError.

    The package refuses tensors that share memory, and a state is made of views into flat buffers: a view is copied, so writing
    takes as much host memory again as the file is large.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise TypeError(
                f"state[{name!r}] is a {tensor.dtype}, {tensor.layout} tensor, which a checkpoint can't hold: convert it"
            )
        host = tensor.detach().to("cpu").contiguous()
        whole[name] = host.clone() if host.data_ptr() == tensor.data_ptr() else host
    try:
        save_file(whole, path)
    except SafetensorError as error:  # the disk's own words, "No space left on device" say
        raise OSError(str(error)) from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return checksum(path)


def checksum(path: Path) -> dict[str, Any]:
    """{"bytes", "crc32"} of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return {"bytes": size, "crc32": crc}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU. Raises OSError, or ValueError when it is not a safetensors file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
