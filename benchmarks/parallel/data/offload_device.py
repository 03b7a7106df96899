"""A step of parameters on a GPU whose states are in host memory, beside its copies alone and the
processor's Adam alone.

    down gradients and parameters, bf16 ----->|
    Adam masters and moments, fp32             |-------->|
    up   parameters, bf16                                |---> a tile at a time, all three at once

What is slowest of the three decides if they hide behind each other: the aim is 1.3 times the slower
of copies and Adam. A trace of one step goes to the folder of PYOPS_BENCH_ROWS, if it is set, for
Perfetto; how much of the copies' time Adam, or a copy the other way, ran too is taken from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from benchmarks.instruments.trace import covered, export, profiled, spans
from benchmarks.training.gpt_step import SIZES, Size
from pyops.offload import Offloaded
from pyops.optim import AdamW

__all__ = ["Copies", "hidden", "parameters_of", "run", "slower", "with_masters"]

TILE = 32 << 20  # bytes of states, Offloaded's own choice
STATES = 12  # bytes per bf16 parameter of AdamW with a master
WITHIN = 1.3
ADAM = ("pyops::adam",)


def with_masters(sizes: list[int], device: torch.device) -> tuple[list[nn.Parameter], AdamW]:
    """bf16 parameters of these sizes under AdamW with masters; those of one size have one
    gradient."""
    gradients = {
        numel: torch.randn(numel, device=device).bfloat16() for numel in sorted(set(sizes))
    }
    params = [
        nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device=device)) for numel in sizes
    ]
    for p in params:
        p.grad = gradients[p.numel()]
    return params, AdamW(params, lr=1e-3, master_weights=True)


def parameters_of(size: Size) -> list[int]:
    """Elements of each parameter of a GPT."""
    d = size.width
    block = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d]
    return [size.vocabulary * d, size.length * d, *block * size.layers, d, d]


class Copies:
    """What a step copies, by itself: gradients and parameters down, parameters up, through pinned
    memory on two streams."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.device = params[0].device
        piece, pinned = TILE // STATES, self.device.type == "cuda"
        flat = [(p.detach().view(-1), p.grad.view(-1)) for p in params if p.grad is not None]
        self.pairs = [
            (v, g)
            for values, grads in flat
            for v, g in zip(values.split(piece), grads.split(piece), strict=True)
        ]
        self.host = [torch.empty(piece, dtype=torch.bfloat16, pin_memory=pinned) for _ in range(3)]
        self.host[2].fill_(1.0)
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if pinned else []

    def down(self) -> None:
        for values, grads in self.pairs:
            self.host[0][: grads.numel()].copy_(grads, non_blocking=True)
            self.host[1][: values.numel()].copy_(values, non_blocking=True)

    def up(self) -> None:
        for values, _ in self.pairs:
            values.copy_(self.host[2][: values.numel()], non_blocking=True)

    def __call__(self) -> None:
        if not self.streams:
            self.down()
            self.up()
            return
        for stream, way in zip(self.streams, (self.down, self.up), strict=True):
            with torch.cuda.stream(stream):
                way()


def same_bits(device: torch.device) -> Callable[[], float]:
    """A check that three offloaded steps of parameters on the device leave those of three ordinary
    ones in host memory."""

    def check() -> float:
        sizes = [300_000, 5_000, 1 << 20]
        (ours, mine), (theirs, plain) = (
            with_masters(sizes, device),
            with_masters(sizes, torch.device("cpu")),
        )
        for p, q in zip(ours, theirs, strict=True):
            assert p.grad is not None
            q.grad = p.grad.cpu()
        offloaded = Offloaded(mine, "cpu", tile_bytes=1 << 20)
        for _ in range(3):
            offloaded.step()
            plain.step()
        if not all(torch.equal(p.cpu(), q) for p, q in zip(ours, theirs, strict=True)) or bool(
            (ours[0] == 1).all()
        ):
            raise AssertionError("offloaded steps differ from ordinary ones")
        offloaded.close()
        return 0.0

    return check


def slower(row: Row) -> dict[str, Any]:
    """How many times the slower of its two parts a step takes."""
    step, *parts = (us[1] for us in row["us"].values())
    return {"times_the_slower": round(step / max(parts), 3)} if len(parts) == 2 else {}


def hidden(events: list[Any]) -> dict[str, Any]:
    """From a step's trace: milliseconds of copies down and up, and in percent of both, while Adam
    or the other way ran too."""
    down, up = (spans(events, f"Memcpy {way}", device=True) for way in ("DtoH", "HtoD"))
    host = spans(events, *ADAM, device=False)
    (down_us, down_hidden), (up_us, up_hidden) = covered(down, host + up), covered(up, host + down)
    if not down_us or not up_us:
        raise RuntimeError("the trace has no copies")
    percent = round(100 * (down_hidden + up_hidden) / (down_us + up_us), 1)
    return {
        "down_ms": round(down_us / 1e3, 2),
        "up_ms": round(up_us / 1e3, 2),
        "percent_of_copies_hidden": percent,
    }


def case(title: str, sizes: list[int], device: torch.device) -> tuple[Case, Callable[[], None]]:
    """The case, and what ends it."""
    params, optimizer = with_masters(sizes, device)
    _, alone = with_masters(sizes, torch.device("cpu"))
    offloaded, copies = Offloaded(optimizer, "cpu", tile_bytes=TILE), Copies(params)

    def observe(row: Row) -> dict[str, Any]:
        found = slower(row)
        if device.type == "cuda":
            trace = profiled(offloaded.step, device)
            if rows := os.environ.get("PYOPS_BENCH_ROWS"):
                export(trace, Path(rows).parent / "offload_step.json.gz")
            found |= hidden(trace.events())
            print(
                "trace of a step:",
                ", ".join(f"{key} {value}" for key, value in found.items()),
                flush=True,
            )
        return found

    made = Case(
        "offload",
        f"step in host memory of {title}, parameters on {device.type}, AdamW bf16 + master",
        {"pyops": offloaded.step, "copies alone": copies, "CPU Adam alone": alone.step},
        device=device,
        check=same_bits(device),
        observe=observe,
        most={"times_the_slower": WITHIN} if device.type == "cuda" else {},
        facts={"state_bytes": STATES * sum(sizes), "copied_bytes": 6 * sum(sizes)},
    )
    return made, offloaded.close


def run(options: Options, *, title: str = "GPT 1.3B") -> list[Row]:
    """The row of one size."""
    made, end = case(title, parameters_of(SIZES[title]), options.device)
    try:
        return run_cases([made], rounds=min(options.rounds, 5), sample_seconds=0.05)
    finally:
        end()
