"""Measure this machine anew for the cluster "laptop": two processes of one thread each.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.plan.measured_laptop

Each figure is the median of some measurements; all else of the file stays as it is.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.instruments.machine import processor
from pyops.plan import Machine
from pyops.plan.clusters import DATA

__all__ = ["figures", "rewritten"]

FILE = DATA / "laptop.toml"
CALLS = 5
WHEN = re.compile(r"(measured by Machine\.here in two processes, the median of ).*?\"")


def figures(several: Sequence[Machine]) -> dict[str, dict[str, float]]:
    """{section: {key: value}} of the file.

    Args:
        several: Measurements of the same machine.
    """
    clusters = [each.cluster() for each in several]

    def middle(values: Sequence[float]) -> float:
        return float(f"{statistics.median(values):.3g}")

    devices = [each.device for each in clusters]
    link = {
        "bandwidth": middle([each.node.bandwidth for each in clusters]),
        "latency": middle([each.node.latency for each in clusters]),
    }
    return {
        "device": {
            "memory_gib": middle([each.memory_gib for each in devices]),
            "memory_bandwidth": middle([each.memory_bandwidth for each in devices]),
        },
        "device.peak": {
            kind: middle([each.peak[kind] for each in devices]) for kind in devices[0].peak
        },
        "node": link,
        "network": link,
    }


def rewritten(
    text: str, found: Mapping[str, Mapping[str, float]], *, name: str, source: str
) -> str:
    """The file with these figures in place of the old ones.

    Args:
        text: Of the file.
        found: {section: {key: value}}.
        name: Of the processor.
        source: How often and when it was measured.
    """
    section, lines = "", []
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        key = line.partition(" = ")[0]
        if section == "device" and key == "name":
            line = f'name = "core of an {name}"'
        elif key in found.get(section, {}):
            line = f"{key} = {found[section][key]!r}"
        lines.append(WHEN.sub(lambda match: f'{match[1]}{source}"', line))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    several = [Machine.here() for _ in range(CALLS)]
    if dist.get_rank() == 0:
        today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        source = f"{CALLS} calls, {today}"
        text = rewritten(FILE.read_text(), figures(several), name=processor(), source=source)
        Path(FILE).write_text(text)
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
