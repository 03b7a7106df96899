"""The files are safetensors that other tools read, and bits come back as they were."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyops.checkpoint.format import tensor_file
from pyops.checkpoint.format.tensor_file import DTYPES, TensorFile, bytes_of, write_tensors


def tensors(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    flat = torch.randn(100, device=device)
    found = {
        str(dtype): (torch.randn(3, 5, device=device) * 50).to(dtype) for dtype in DTYPES.values()
    }
    found["view of a flat buffer"] = flat[10:40].view(5, 6)
    found["another view"] = flat[30:60]
    found["transposed"] = torch.randn(4, 7, device=device).t()
    found["scalar"] = torch.tensor(2.5, device=device)
    found["empty"] = torch.empty(0, 3, device=device)
    found["not a number"] = torch.tensor([float("nan"), float("inf"), -0.0], device=device)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_all(path: Path, expected: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    file, found = TensorFile(path, expected), {}
    for name, entry in file.entries.items():
        found[name] = torch.empty(entry.shape, dtype=entry.dtype)
        file.read(entry.start, bytes_of(found[name]))
    return found


def test_bits_come_back_to_us_and_to_others(tmp_path, device):
    given = tensors(device)
    entry = write_tensors(tmp_path / "t.safetensors", given)
    assert entry["bytes"] == (tmp_path / "t.safetensors").stat().st_size
    for again in read_all(tmp_path / "t.safetensors", entry), load_file(tmp_path / "t.safetensors"):
        assert set(again) == set(given)
        for name, tensor in given.items():
            assert again[name].dtype == tensor.dtype
            assert again[name].shape == tensor.shape
            assert bits(again[name]) == bits(tensor), name
    save_file(
        {name: tensor.cpu().contiguous().clone() for name, tensor in given.items()},
        tmp_path / "theirs",
    )
    assert set(read_all(tmp_path / "theirs")) == set(given)


def test_checksums_are_those_of_the_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 1 << 10)
    monkeypatch.setattr(tensor_file, "MAX_BLOCKS", 8)
    monkeypatch.setattr(tensor_file, "PIECE", 700)
    entry = write_tensors(
        tmp_path / "t", {"a": torch.randn(5000), "b": torch.ones(3, dtype=torch.int8)}
    )
    data = (tmp_path / "t").read_bytes()
    assert entry["block"] == 4096, "grown until there are at most 8"
    assert entry["crc32"] == [zlib.crc32(data[at : at + 4096]) for at in range(0, len(data), 4096)]


def test_only_the_blocks_of_what_is_read_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 1 << 10)
    path = tmp_path / "t"
    given = {"a": torch.randn(4096), "b": torch.randn(4096)}
    entry = write_tensors(path, given)
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    file = TensorFile(path, entry)
    place = file.entries["b"]
    file.compare(place.start, place.stop)
    start, target = file.entries["a"].start, torch.empty(500)
    file.read(start + 4 * 100, bytes_of(target))
    assert torch.equal(target, given["a"][100:600])
    with pytest.raises(
        ValueError, match="the checksum of bytes 8192 to 9216 is not the manifest's"
    ):
        file.read(start, bytes_of(torch.empty(4096)))
    data[-1] ^= 1
    path.write_bytes(data)
    file = TensorFile(path, entry)
    file.compare(place.start, place.stop - 1024)
    with pytest.raises(ValueError, match="the checksum of bytes 32768 to"):
        file.compare(place.start, place.stop)
    write_tensors(path, given)
    with pytest.raises(ValueError, match="was replaced while it was read"):
        file.compare(start, place.stop)


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    inner = os.write
    monkeypatch.setattr(
        tensor_file.os, "write", lambda fd, data: inner(fd, data[: 1 + len(data) // 2])
    )
    given = {"a": torch.randn(1000)}
    assert torch.equal(
        read_all(tmp_path / "t", write_tensors(tmp_path / "t", given))["a"], given["a"]
    )


def test_what_a_file_cannot_hold(tmp_path):
    for tensor in (
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
    ):
        with pytest.raises(TypeError, match=r"state\['x'\] is a torch.* tensor, which"):
            write_tensors(tmp_path / "t", {"x": tensor})
    assert not (tmp_path / "t").exists()


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def one(**changes: Any) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        (1 << 40).to_bytes(8, "little") + b"{}",
        header("[}"),
        header("[]"),
        header("[" * 10000),
        header(one()),
        header(one(), bytes(7)),
        header(one(), bytes(9)),
        header(one(shape=[3]), bytes(8)),
        header(one(shape=[1 << 70]), bytes(8)),
        header(one(shape=[-2]), bytes(8)),
        header(one(shape=[True, 2]), bytes(8)),
        header(one(shape=2), bytes(8)),
        header(one(dtype="load"), bytes(8)),
        header(one(dtype=["F32"]), bytes(8)),
        header(one(data_offsets=[8, 16]), bytes(16)),
        header(one(data_offsets=[-8, 0]), bytes(8)),
        header(one(data_offsets=[0, 4, 8]), bytes(8)),
        header(one()[:-1] + ', "b": ' + one()[6:], bytes(8)),  # both at the same place
    ],
)
def test_a_header_that_makes_no_sense(tmp_path, data):
    (tmp_path / "t").write_bytes(header(one(), bytes(8)))
    assert set(TensorFile(tmp_path / "t").entries) == {"a"}
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(ValueError, match=r"header|too few"):
        TensorFile(tmp_path / "t")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t")
    with pytest.raises(ValueError, match="not a regular file"):
        TensorFile(tmp_path / "t")
