"""What nvcc makes of the kernels: none divides by what is a power of two."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")


@pytest.mark.full  # compiles for ten seconds each
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("stem", ["optim", "lamb"])
def test_rows_and_chunks_are_found_by_shifts(tmp_path, stem):
    """A division of 64 bits is a call of some eighty instructions, once for each row and chunk.
    With / and % where shifts are there were 40 and 68, and 12 where a CTA's chunks are found."""
    headers = Path(torch.__file__).parent / "include"
    command = [
        *(NVCC, "-std=c++17", "-O3", "-fmad=false", "-arch=sm_90", "-ptx", "-isystem", headers),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA=1"),
        *(ROOT / "csrc" / "cuda" / f"{stem}.cu", "-o", tmp_path / "kernels.ptx"),
    ]
    subprocess.run(command, check=True)
    text = (tmp_path / "kernels.ptx").read_text()
    assert text.count(".visible .entry") >= 2
    assert not re.findall(r"(?:div|rem)\.[us]64", text)
