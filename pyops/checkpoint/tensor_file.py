"""Safetensors files, written in one pass and read by memory map.

    8 bytes: length of the header | JSON {name: {dtype, shape, data_offsets}} | the tensors' bytes, one after the other

The format of https://github.com/huggingface/safetensors, so that any other tool opens the files. Written here rather
than
by the package because state is made of views into flat buffers, which the package refuses to write without a copy of
everything, and because the checksum and the full disk are seen while writing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["checksum", "read_tensors", "write_tensors"]

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
NAMES = {name: dtype for dtype, name in DTYPES.items()}
CHUNK = 16 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write and flush to the disk; {"bytes": size, "crc32": checksum} of the file. Raises TypeError, OSError.

    One tensor at a time is copied to the host, if it is not there already.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise TypeError(
                f"state[{name!r}] is a {tensor.dtype}, {tensor.layout} tensor, which a checkpoint can't hold: convert it"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    size, crc = 0, 0
    with open(path, "wb") as file:

        def write(piece: Any) -> None:
            nonlocal size, crc
            file.write(piece)
            size, crc = size + len(piece), zlib.crc32(piece, crc)

        write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            data: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
            for i in range(0, data.size, CHUNK):
                write(memoryview(data[i : i + CHUNK]))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": crc}


def checksum(path: Path) -> dict[str, Any]:
    """{"bytes", "crc32"} of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return {"bytes": size, "crc32": crc}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU. Raises OSError, or ValueError when the header makes no sense."""
    data = np.fromfile(path, dtype=np.uint8)
    if data.size < 8:
        raise ValueError("it is shorter than a header")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if start > data.size:
        raise ValueError("its header is cut off")
    tensors = {}
    whole = torch.from_numpy(data)[start:]
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        # Copied, so that a tensor is aligned and one of them does not keep all in memory.
        tensors[name] = whole[begin:end].clone().view(NAMES[entry["dtype"]]).reshape(entry["shape"])
    return tensors
