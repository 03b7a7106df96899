"""The files are safetensors that other tools read, and bits come back as they were."""

from __future__ import annotations

import pytest
import torch

from pyops.checkpoint.tensor_file import DTYPES, checksum, read_tensors, write_tensors


def tensors(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    flat = torch.randn(100, device=device)
    found = {str(dtype): (torch.randn(3, 5, device=device) * 50).to(dtype) for dtype in DTYPES}
    found["view of a flat buffer"] = flat[10:40].view(5, 6)
    found["another view"] = flat[30:60]
    found["transposed"] = torch.randn(4, 7, device=device).t()
    found["scalar"] = torch.tensor(2.5, device=device)
    found["empty"] = torch.empty(0, 3, device=device)
    found["not a number"] = torch.tensor([float("nan"), float("inf"), -0.0], device=device)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_bits_come_back(tmp_path, device):
    given = tensors(device)
    entry = write_tensors(tmp_path / "t.safetensors", given)
    assert entry == checksum(tmp_path / "t.safetensors")
    again = read_tensors(tmp_path / "t.safetensors")
    assert set(again) == set(given)
    for name, tensor in given.items():
        assert again[name].dtype == tensor.dtype
        assert again[name].shape == tensor.shape
        assert bits(again[name]) == bits(tensor), name


def test_what_a_file_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match=r"state\['x'\] is a torch.complex64"):
        write_tensors(tmp_path / "t", {"x": torch.zeros(2, dtype=torch.complex64)})
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("text", [b"", b"abc", (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[}"])
def test_a_header_that_makes_no_sense(tmp_path, text):
    (tmp_path / "t").write_bytes(text)
    with pytest.raises(ValueError):
        read_tensors(tmp_path / "t")
