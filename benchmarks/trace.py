"""What a call did, seen by torch's profiler: kernels launched, waits of the host, and how far copies hid behind other work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Interval", "covered", "export", "kernels", "launched", "on_device", "profiled", "spans", "waits"]

Interval = tuple[float, float]
NO_KERNEL = ("Memcpy", "Memset")
# Calls of the CUDA runtime in which the host waits for the device, and torch's own that copies a number to the host.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


def profiled(call: Callable[[], object], device: torch.device) -> Any:
    """torch's profile of one call, which ends when the device is done."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return found


def on_device(event: Any) -> bool:
    """Whether an event of a profile is work of the device; spans that the program named are shown there too, and are not."""
    return event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)


def kernels(events: Iterable[Any]) -> Counter[str]:
    """How often each kernel ran on the device; copies and fills are none."""
    return Counter(e.name for e in events if on_device(e) and not e.name.startswith(NO_KERNEL))


def waits(events: Iterable[Any]) -> Counter[str]:
    """How often the host waited, by the call in which it did; the profile's own last wait is left out.

    aten::_local_scalar_dense: numbers read, on a GPU by a copy whose stream is then waited for.
    """
    found = Counter(e.name for e in events if not on_device(e) and e.name in WAITS)
    if found["cudaDeviceSynchronize"]:
        found["cudaDeviceSynchronize"] -= 1
    return +found


def spans(events: Iterable[Any], *names: str, device: bool) -> list[Interval]:
    """(start, end), in microseconds, of events on the device, or on the host, whose name has one of `names` in it."""
    return [
        (e.time_range.start, e.time_range.end)
        for e in events
        if on_device(e) == device and any(name in e.name for name in names)
    ]


def covered(copies: Iterable[Interval], others: Iterable[Interval]) -> tuple[float, float]:
    """How long the copies took in all, overlaps among them counted once, and for how much of it any of `others` ran too."""
    mine, theirs = _union(copies), _union(others)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in mine for c, d in theirs)
    return sum(b - a for a, b in mine), both


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def launched(call: Callable[[], object], device: torch.device) -> Callable[[Mapping[str, Any]], dict[str, int]]:
    """For `Case.observe`: how many kernels one call launches. Nothing on a CPU."""

    def observe(row: Mapping[str, Any]) -> dict[str, int]:
        if device.type != "cuda":
            return {}
        found = sum(kernels(profiled(call, device).events()).values())
        if not found:
            raise RuntimeError("the profiler saw no kernel")
        return {"launches": found}

    return observe


def export(found: Any, path: Path) -> None:
    """The profile as a trace for Perfetto or chrome://tracing; .gz packs it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
