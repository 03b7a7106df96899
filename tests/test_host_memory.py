"""Free memory is the least of what the machine and the control groups above a process have left."""

from __future__ import annotations

import ctypes
import gc
import os
import types
from pathlib import Path

import pytest
import torch

from pyops.host_memory import free_memory, pinned_empty, total_memory
from pyops.offload.async_file import aligned_empty

pytestmark = pytest.mark.cpu_only

MIB = 2**20


def machine(root: Path, *, groups: str, files: dict[str, int | str]) -> Path:
    """With 2,000 MiB, 1,000 of them available. files: by group and name below sys/fs/cgroup, sizes
    in bytes."""
    texts = {
        "proc/meminfo": f"MemTotal: {2000 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n",
        "proc/self/cgroup": groups,
    }
    texts |= {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(path: str, most: int | str, used: int, cached: int) -> dict[str, int | str]:
    return {
        f"{path}memory.max": most,
        f"{path}memory.current": used,
        f"{path}memory.stat": f"anon 7\nactive_file {9 * MIB}\ninactive_file {cached}",
    }


def test_a_container_is_the_root_of_its_groups(tmp_path):
    root = machine(tmp_path, groups="0::/\n", files=group("", 300 * MIB, 250 * MIB, 40 * MIB))
    assert free_memory(root) == 90 * MIB
    assert total_memory(root) == 300 * MIB


def test_a_job_has_what_the_tightest_group_above_it_has(tmp_path):
    files = group("slurm/", 400 * MIB, 100 * MIB, 0) | group("slurm/job/", "max", 90 * MIB, 0)
    files |= group("slurm/job/step/", 5000 * MIB, 90 * MIB, 0)
    assert free_memory(machine(tmp_path, groups="0::/slurm/job/step\n", files=files)) == 300 * MIB


def test_version_1_and_a_path_of_the_host(tmp_path):
    files: dict[str, int | str] = {
        "memory/memory.limit_in_bytes": 200 * MIB,
        "memory/memory.usage_in_bytes": 220 * MIB,
        "memory/memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {30 * MIB}",
    }
    groups = "9:name=systemd:/docker/3f\n4:cpu,memory:/docker/3f\n0::/docker/3f\n"
    assert free_memory(machine(tmp_path, groups=groups, files=files)) == 10 * MIB


def test_no_limit(tmp_path):
    assert (
        free_memory(machine(tmp_path, groups="0::/user\n", files=group("user/", "max", 5, 0)))
        == 1000 * MIB
    )
    os.remove(tmp_path / "proc/self/cgroup")
    assert free_memory(tmp_path) == 1000 * MIB
    assert total_memory(tmp_path) == 2000 * MIB
    assert total_memory() >= free_memory() > 0


def test_pinned_memory_is_as_large_as_asked_for(monkeypatch):
    """Not the next power of two, and CUDA hears of its end before it goes."""

    class Runtime:
        def __init__(self):
            self.pinned, self.log = {}, []

        def cudaHostRegister(self, address, nbytes, flags):
            self.pinned[address] = nbytes
            return 0

        def cudaHostUnregister(self, address):
            with open("/proc/self/maps") as file:
                assert any(int(line.split("-")[0], 16) <= address for line in file)
            ctypes.string_at(address, 1)  # it must still be there
            self.log.append(self.pinned.pop(address))

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.log.append("waited"))
    nbytes = (5 << 20) + 4096
    for make in (pinned_empty, lambda n: aligned_empty(n, pin_memory=True)):
        memory = make(nbytes)
        assert memory.shape == (nbytes,)
        assert memory.data_ptr() % 4096 == 0
        assert list(runtime.pinned.values()) == [nbytes]
        view = memory[4096:].view(torch.float32)
        del memory
        gc.collect()
        assert runtime.pinned
        view.fill_(1.0)
        del view
        gc.collect()
        assert runtime.log == ["waited", nbytes]
        runtime.log.clear()
    refused = types.SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refused)
    with pytest.raises(RuntimeError, match=f"could not pin {nbytes} bytes .* error 2"):
        pinned_empty(nbytes)
