"""What a call did, seen by torch's profiler: kernels launched, waits of the host, and how far
copies hid behind other work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = [
    "CALL",
    "Interval",
    "covered",
    "export",
    "kernels",
    "launched",
    "profiled",
    "spans",
    "takes_place",
    "waits",
]

Interval = tuple[float, float]
CALL = "the call that is profiled"
NO_KERNEL = ("Memcpy", "Memset")
# Calls of the CUDA runtime in which the host waits for the device, and torch's own that copies a
# number to the host.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)


def profiled(call: Callable[[], object], device: torch.device) -> Any:
    """torch's profile of one call, which ends when the device is done; the call itself is a span of
    it, named CALL."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        with record_function(CALL):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return found


def takes_place(event: Any, *, device: bool) -> bool:
    """Whether an event of a profile is work of the device, or else of the host.

    Spans that the program named, such as an optimizer's step, are shown on the device a second
    time, and are neither there.
    """
    if event.device_type != torch.autograd.DeviceType.CUDA:
        return not device
    return device and not getattr(event, "is_user_annotation", False)


def kernels(events: Iterable[Any]) -> Counter[str]:
    """How often each kernel ran on the device; copies and fills are none."""
    return Counter(
        e.name for e in events if takes_place(e, device=True) and not e.name.startswith(NO_KERNEL)
    )


def waits(events: Iterable[Any]) -> Counter[str]:
    """How often the host waited during the call, by what it waited in; the profile's own waits lie
    outside.

    aten::_local_scalar_dense: numbers read, on a GPU by a copy whose stream is then waited for.
    """
    events = list(events)
    calls = spans(events, CALL, device=False)
    return Counter(
        e.name
        for e in events
        if takes_place(e, device=False)
        and e.name in WAITS
        and any(start <= e.time_range.start < end for start, end in calls)
    )


def spans(events: Iterable[Any], *names: str, device: bool) -> list[Interval]:
    """(start, end), in microseconds, of events on the device, or on the host, whose name has one of
    `names` in it."""
    return [
        (e.time_range.start, e.time_range.end)
        for e in events
        if takes_place(e, device=device) and any(name in e.name for name in names)
    ]


def covered(copies: Iterable[Interval], others: Iterable[Interval]) -> tuple[float, float]:
    """How long the copies took in all, overlaps among them counted once, and for how much of it any
    of `others` ran too."""
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


def launched(
    call: Callable[[], object], device: torch.device
) -> Callable[[Mapping[str, Any]], dict[str, int]]:
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
