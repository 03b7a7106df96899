"""One trace of all ranks for Perfetto: each rank a process, with its operations, its parts and its
memory on tracks.

    rank 0   operations  ...............      by torch's profiler
             parts       |blocks.0|blocks.1   by `Parts`
             memory      __/--\\___            bytes that are allocated
    rank 1   ...                              on the clock of rank 0

https://ui.perfetto.dev opens the file.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pyops.comm.agreement import gather
from pyops.observe.profile.parts import Parts

__all__ = ["MemoryPoint", "clock_offsets", "memory_of", "merge", "peak_of", "trace_step"]

SAME = 2_000_000  # nanoseconds: clocks that are less apart are taken for one
PINGS = 5


@dataclass(frozen=True)
class MemoryPoint:
    """What was allocated at a moment of a step."""

    seconds: float
    """Since the trace began."""
    nbytes: int


def trace_step(step: Callable[[], object], parts: Parts, device: torch.device) -> dict[str, Any]:
    """Take a step under torch's profiler: its trace, as Chrome's format has it, with tracks for
    parts and memory.

    Args:
        step: Takes a step.
        parts: Tells its parts.
        device: Whose memory counts.
    """
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds, profile_memory=True, acc_events=True) as found, parts.step():
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = trace["traceEvents"]
    start = (parts.began_at - base) / 1e3
    track = {"ph": "X", "cat": "part", "pid": 0, "tid": "parts"}
    events += [
        {
            **track,
            "name": " ".join(filter(None, (span.part.name or "model", span.part.phase))),
            "ts": start + 1e6 * span.begun,
            "dur": 1e6 * span.seconds,
        }
        for span in parts.spans
    ]
    kind = 1 if device.type == "cuda" else 0
    events += [
        {
            "ph": "C",
            "name": "memory",
            "pid": 0,
            "ts": e["ts"],
            "args": {"bytes": e["args"]["Total Allocated"]},
        }
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == kind
    ]
    return {"traceEvents": events, "baseTimeNanoseconds": base}


def memory_of(trace: dict[str, Any]) -> list[MemoryPoint]:
    """The memory over a traced step, in the order of time.

    Args:
        trace: As `trace_step` gives it.
    """
    points = [
        (e["ts"], e["args"]["bytes"])
        for e in trace["traceEvents"]
        if e.get("ph") == "C" and e.get("name") == "memory"
    ]
    points.sort()
    first = points[0][0] if points else 0.0
    return [MemoryPoint((ts - first) / 1e6, nbytes) for ts, nbytes in points]


def peak_of(trace: dict[str, Any]) -> tuple[int, str]:
    """The most bytes that were allocated beyond those at the beginning, and in which part.

    Args:
        trace: As `trace_step` gives it.
    """
    counters = [e for e in trace["traceEvents"] if e.get("ph") == "C" and e["name"] == "memory"]
    if not counters:
        return 0, ""
    counters.sort(key=lambda e: e["ts"])
    peak = max(counters, key=lambda e: e["args"]["bytes"])
    name = next(
        (
            e["name"]
            for e in trace["traceEvents"]
            if e.get("cat") == "part" and e["ts"] <= peak["ts"] < e["ts"] + e["dur"]
        ),
        "",
    )
    return peak["args"]["bytes"] - counters[0]["args"]["bytes"], name


def clock_offsets() -> list[int]:
    """How far each rank's clock is before that of rank 0, in nanoseconds; 0 where they are one.
    Collective: every rank must call it."""
    found = []
    for _ in range(PINGS):
        gather(0)  # all leave it at nearly the same time
        found.append(gather(time.time_ns()))
    middle = sorted(found, key=lambda times: max(times) - min(times))[0]
    offsets = [each - middle[0] for each in middle]
    return [each if abs(each) > SAME else 0 for each in offsets]


def merge(traces: Sequence[dict[str, Any]], path: Path, *, offsets: Sequence[int]) -> None:
    """Write the traces of all ranks as one.

    Args:
        traces: By rank, as `trace_step` gives them.
        path: Of the file; .gz packs it.
        offsets: As `clock_offsets` gives them.
    """
    base = min(trace["baseTimeNanoseconds"] for trace in traces)
    events: list[dict[str, Any]] = []
    for rank, (trace, offset) in enumerate(zip(traces, offsets, strict=True)):
        shift = (trace["baseTimeNanoseconds"] - offset - base) / 1e3
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels"):
                continue
            event = {**event, "pid": rank, "tid": str(event.get("tid", ""))}
            if "ts" in event:
                event["ts"] = event["ts"] + shift
            events.append(event)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
