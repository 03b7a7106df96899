"""The most memory that each rank of a pipeline takes in a step, as torch's allocator counts it,
beside what the simulator says.

Counted: every allocation and release of the process from the beginning of the step on (torch's
profiler), so weights and gradients, which are there before, are left out on both sides. Beyond the
simulated bytes are what an operation needs while it runs, messages under way, and gradients of
weights before they are added: what one layer takes, whatever the number of layers of a stage, so
less than what one micro-batch keeps on a stage of some layers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row
from pyops.pipeline import Pipeline, PipelineConfig, balance, profile, schedule, simulate

__all__ = ["CASES", "allocated", "run"]

WIDTH, HEADS, LENGTH, BLOCKS, ROWS, MICROBATCHES = 64, 4, 128, 16, 2, 8
CASES: tuple[tuple[str, int, str], ...] = (
    ("gpipe", 2, "never"),
    ("gpipe", 2, "always"),
    ("1f1b", 2, "never"),
    ("1f1b", 4, "never"),
    ("1f1b", 4, "always"),
    ("interleaved", 2, "never"),
    ("zb1p", 4, "never"),
    ("zbv", 2, "never"),
)


def model() -> list[nn.Module]:
    """Transformer blocks; the same weights at every call."""
    torch.manual_seed(0)
    made = [
        nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    return list(made)


def allocated(run: Callable[[], object]) -> int:
    """The most bytes at a time that were allocated since `run` began."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        run()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def measure_rank(name: str, size: int, recompute: str) -> dict[str, float]:
    """Of this rank: bytes allocated, simulated, and kept of one micro-batch."""
    rank, group = dist.get_rank(), dist.group.WORLD
    made = schedule(name, num_stages=size, num_microbatches=MICROBATCHES).with_recompute(recompute)
    generator = torch.Generator().manual_seed(0)
    x, target = (
        torch.randn(ROWS * MICROBATCHES, LENGTH, WIDTH, generator=generator) for _ in range(2)
    )
    layers, loss = model(), nn.functional.mse_loss
    found = profile(layers, x[:ROWS], loss=loss, target=target[:ROWS], rounds=1, group=group)
    bounds = balance(found, num_stages=made.num_stages, by="parameters")
    costs = found.costs(bounds, split=made.splits_backward)
    timeline = simulate(made, costs)
    pipeline = Pipeline(
        layers, schedule=made, group=group, loss=loss, config=PipelineConfig(boundaries=bounds)
    )

    def step() -> Tensor:
        return pipeline.step(
            x if pipeline.has_first else None, target if pipeline.has_last else None
        )

    step()
    step()
    dist.barrier()
    stages = made.stages_of(rank)
    return {
        "peak": allocated(step),
        "simulated": timeline.memory[rank] - sum(costs.of("weights", stage) for stage in stages),
        "one": sum(costs.of("kept", stage) for stage in stages),
    }


def _serve(
    rank: int, size: int, port: int, cases: list[tuple[str, int, str]], results: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for case in cases:
        results.put((case, rank, measure_rank(*case)))
        dist.barrier()
    dist.destroy_process_group()


def _on_ranks(
    size: int, cases: list[tuple[str, int, str]]
) -> dict[tuple[str, int, str], list[dict[str, float]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_serve, (size, port, cases, results), nprocs=size)
    found: dict[tuple[str, int, str], dict[int, dict[str, float]]] = {case: {} for case in cases}
    while not results.empty():
        case, rank, result = results.get()
        found[case][rank] = result
    return {case: [several[rank] for rank in sorted(several)] for case, several in found.items()}


def _rows(options: Any) -> Iterator[Row]:
    for size in sorted({size for _, size, _ in CASES}):
        names = {
            case: f"{case[0]}, {size} ranks, {MICROBATCHES} micro-batches, recompute {case[2]}"
            for case in CASES
            if case[1] == size
        }
        chosen = [
            case for case, name in names.items() if options.only is None or options.only in name
        ]
        for case, ranks in _on_ranks(size, chosen).items() if chosen else ():
            off = [(rank["peak"] - rank["simulated"]) / rank["one"] for rank in ranks]
            if not all(0 <= each <= 1 for each in off):
                raise AssertionError(
                    f"{names[case]}: ranks take {off} micro-batches' activations more "
                    "than simulated"
                )
            yield {
                "bench": "pipeline_memory",
                "case": names[case],
                "device": "cpu",
                "speedup": {},
                "max_error": None,
                "rounds": 1,
                "us": {},
                "ranks": size,
                "peak_mib": [round(rank["peak"] / 2**20, 2) for rank in ranks],
                "simulated_mib": [round(rank["simulated"] / 2**20, 2) for rank in ranks],
                "off_in_micro_batches": [round(each, 2) for each in off],
                "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
                "versions": machine.versions(),
                "commit": machine.commit(),
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    found = []
    for row in _rows(options):
        sizes = (
            f"MiB {row['peak_mib']}, simulated {row['simulated_mib']}, off by "
            f"{row['off_in_micro_batches']}"
        )
        print(f"{row['case']:<54} {sizes} micro-batches", flush=True)
        found.append(row)
    return found
