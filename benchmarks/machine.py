"""What a row was measured on: processor, accelerator, versions, commit, and the speed of a plain copy.

No row names a host or a user: a machine is its processor model, its cores and its accelerator.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["commit", "copy_bandwidth", "describe", "slug", "versions"]

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


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
    found: dict[str, Any] = {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
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
    """The short commit of the sources, with a plus when tracked sources differ from it; None outside of git."""
    folder = Path(__file__).resolve().parent.parent
    try:
        short = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "csrc", "pyops"],
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
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
    """Bytes per second of `out.copy_(source)`, read and written bytes both counted: the roof of what only moves memory.

    Measured once per process, the median of 15 copies of 256 MiB (4 GiB on a GPU).
    """
    numel = COPY_BYTES.get(device.type, 1 << 28) // 4
    source, out = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    seconds = []
    for attempt in range(18):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        out.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt >= 3:
            seconds.append(time.perf_counter() - start)
    return 8 * numel / sorted(seconds)[len(seconds) // 2]
