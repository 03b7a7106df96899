"""What nvcc makes of the kernels: none divides by what is a power of two, and where the number of
CTAs is fixed all of them run at a time."""

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
REGISTERS, MULTIPROCESSORS = 65536, 132  # of a multiprocessor of sm_90; of an H100 or H200


def source(name: str) -> Path:
    (found,) = (ROOT / "csrc" / "cuda").rglob(name)
    return found


def compiled(stem: str, *options: str | Path) -> str:
    """What nvcc says while it compiles a source for sm_90."""
    headers = Path(torch.__file__).parent / "include"
    command = [
        *(str(NVCC), "-std=c++17", "-O3", "-arch=sm_90", "-isystem", headers),
        *("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA=1"),
        *options,
        source(f"{stem}.cu"),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.mark.full  # compiles for ten seconds each
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("stem", ["optim", "lamb"])
def test_rows_and_chunks_are_found_by_shifts(tmp_path, stem):
    """A division of 64 bits is a call of some eighty instructions, once for each row and chunk.
    With / and % where shifts are there were 40 and 68, and 12 where a CTA's chunks are found."""
    compiled(stem, "-fmad=false", "-ptx", "-o", tmp_path / "kernels.ptx")
    text = (tmp_path / "kernels.ptx").read_text()
    assert text.count(".visible .entry") >= 2
    assert not re.findall(r"(?:div|rem)\.[us]64", text)


@pytest.mark.full  # compiles for ten seconds each
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("stem", "kernel", "exact"),
    [("grad_norm", "norm_kernel", False), ("onebit", "onebit_norm_kernel", True)],
)
def test_all_ctas_of_a_sum_run_at_a_time(tmp_path, stem, kernel, exact):
    """A fixed number of CTAs adds up in an order that no device changes. Those that find no room at
    first run by themselves later, with too few bytes on their way: with 40 registers squared_norm
    had 232 of 1024 left over, and an H200 reached 70 % of a copy."""
    options = ["-fmad=false"] if exact else []
    said = compiled(stem, *options, "-Xptxas", "-v", "-cubin", "-o", tmp_path / "kernels.cubin")
    entries = re.findall(r"Compiling entry function '(\S+)'.*?Used (\d+) registers", said, re.S)
    ours = {name: int(count) for name, count in entries if f"{len(kernel)}{kernel}" in name}
    assert len(ours) >= 2
    (ctas,) = re.findall(
        r"(?:NORM|ONEBIT)_CTAS = (\d+)",
        source(f"{stem}_kernel.cuh").read_text(),
    )
    for name, registers in ours.items():
        at_a_time = REGISTERS // (256 * (-(-registers // 8) * 8)) * MULTIPROCESSORS
        assert int(ctas) <= at_a_time, f"{name}: {registers} registers"
