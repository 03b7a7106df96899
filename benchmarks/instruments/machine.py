"""What a row was measured on: processor, accelerator, versions, commit, and the speed of a plain
copy and of a matrix product.

No row names a host or a user: a machine is its processor model, its cores and its accelerator.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["commit", "copy_bandwidth", "describe", "matmul_flops", "slug", "versions"]

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
MATMUL = {"cpu": (1024, torch.float32), "cuda": (8192, torch.bfloat16)}  # width, dtype


def processor() -> str:
    """The processor's model name, as the operating system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """The machine as a row records it; `threads` are those torch computes with."""
    found: dict[str, Any] = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30)}
    return found


def versions() -> dict[str, str]:
    import pyops

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if (version := getattr(pyops, "__version__", None)) is not None:
        found["pyops"] = version
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The short commit of the sources, with a plus when tracked sources differ from it.

    What the environment variable PYOPS_COMMIT says comes first, for a copy of the sources, which
    may lie in a repository of its own; outside of git else None.
    """
    if "PYOPS_COMMIT" in os.environ:
        return os.environ["PYOPS_COMMIT"]
    folder = Path(__file__).resolve().parents[2]
    try:
        short = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "csrc", "pyops"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return short + ("+" if changed else "")


def slug(machine: dict[str, Any]) -> str:
    """The name of the machine's file of results: `nvidia-h200`, or `amd-epyc-2-cores`."""
    name = machine.get("gpu") or machine["cpu"]
    name = re.sub(r"\((r|tm)\)|@.*|\b\d+-core\b|\bprocessor\b|\bcpu\b", " ", name.lower())
    name += "" if machine.get("gpu") else f" {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


@lru_cache(maxsize=4)
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of `out.copy_(source)`, read and written bytes both counted: the roof of
    what only moves memory.

    Measured once per process, the median of 15 copies of 256 MiB (4 GiB on a GPU).
    """
    numel = COPY_BYTES.get(device.type, 1 << 28) // 4
    source, out = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    return 8 * numel / _median_seconds(lambda: out.copy_(source), device)


@lru_cache(maxsize=4)
def matmul_flops(device: torch.device) -> float:
    """Operations per second of a product of two square matrices: the roof of what only computes.

    Of normal random numbers, whose products draw more power than those of constants. 8192 wide in
    bf16 on a GPU, 1024 in fp32 on a CPU. Measured once per process, the median of 15 times four
    products.
    """
    width, dtype = MATMUL.get(device.type, MATMUL["cpu"])
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, b, out=out)

    return 4 * 2 * width**3 / _median_seconds(products, device)


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of 15 calls after three."""
    seconds = []
    for _ in range(18):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[3:])[7]
