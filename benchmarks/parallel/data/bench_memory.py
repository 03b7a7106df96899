"""What each rank keeps and sends at every stage of ZeRO, counted, beside the formulas of the paper;
drawn by memory_picture.

    bytes of a 16-bit parameter with AdamW     stage 0: 16  1: 4 + 12 / N  2: 2 + 14 / N  3: 16 / N
    elements sent in a step, times (N - 1) / N       0: 2   1: 2           2: 2           3: 3

Kept: all storages that tensors of the process hold between a backward and its step, without inputs.
Sent: as the collectives count, and, with 2 ranks as root, as the interfaces between two network
namespaces count, all headers included. Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054,
sections 5 and 7.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row
from benchmarks.instruments.storages import storages
from pyops.comm.collectives.communicator import Communicator
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer

__all__ = ["FORMULA", "SENT", "bytes_of_tensors", "run"]

# Bytes of a parameter that every rank keeps, and that are shared out.
FORMULA = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
SENT = {0: 2, 1: 2, 2: 2, 3: 3}
RANKS = (1, 2, 4)
WIDTH, LAYERS = 512, 12
BUCKET = 1 << 20


def bytes_of_tensors() -> int:
    """Bytes of all storages that a tensor of this process keeps alive."""
    return sum(storages().values())


def measure_rank(stage: int) -> dict[str, Any]:
    """Of this rank: bytes kept in all and by kind, bytes sent in a step, seconds of a step; number
    of parameters."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = bytes_of_tensors()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    numel = sum(p.numel() for p in model.parameters())
    optimizer = ZeroOptimizer(model, AdamW, ZeroConfig(stage=stage, bucket_bytes=BUCKET), lr=1e-3)

    def backward() -> None:
        model(x).float().square().mean().backward()

    backward()
    optimizer.step()
    backward()
    kept = bytes_of_tensors() - before
    kinds = optimizer.memory()
    sent = -Communicator.of().bytes_sent if size > 1 else 0
    start = time.perf_counter()
    optimizer.step()
    backward()
    seconds = time.perf_counter() - start
    sent += Communicator.of().bytes_sent if size > 1 else 0
    return {"kept": kept, "kinds": kinds, "sent": sent, "seconds": seconds, "numel": numel}


def wire(*, stages: list[int]) -> dict[str, float]:
    """{stage: bytes per parameter that this rank's interface sends in a step}; runs within
    `slow_link.Link.run`."""
    from benchmarks.links.slow_link import wire_bytes

    found = {}
    for stage in stages:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
        numel = sum(p.numel() for p in model.parameters())
        optimizer = ZeroOptimizer(
            model, AdamW, ZeroConfig(stage=stage, bucket_bytes=BUCKET), lr=1e-3
        )
        x = torch.randn(4, WIDTH).bfloat16()
        for step in range(6):
            if step == 1:
                dist.barrier()
                before = wire_bytes()["sent"]
            model(x).float().square().mean().backward()
            optimizer.step()
        dist.barrier()
        found[str(stage)] = (wire_bytes()["sent"] - before) / 5 / numel
    return found


def _on_the_wire(stages: list[int]) -> dict[str, float]:
    """Of the rank that sends most; {} where no namespaces can be made."""
    from benchmarks.links.slow_link import Link, available

    if (reason := available()) is not None:
        print(f"no namespaces here: {reason}")
        return {}
    with Link(ranks=2, mbit=10_000) as link:
        results = link.run(
            "benchmarks.parallel.data.bench_memory:wire", {"stages": stages}, timeout=300
        )
    return {stage: max(result[stage] for result in results) for stage in results[0]}


def _serve(rank: int, size: int, port: int, stages: list[int], results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for stage in stages:
        results.put((stage, measure_rank(stage)))
        dist.barrier()
    dist.destroy_process_group()


def _on_ranks(size: int, stages: list[int]) -> dict[int, list[dict[str, Any]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_serve, (size, port, stages, results), nprocs=size)
    found: dict[int, list[dict[str, Any]]] = {stage: [] for stage in stages}
    while not results.empty():
        stage, result = results.get()
        found[stage].append(result)
    return found


def _rows(options: Any) -> Iterator[Row]:
    for size in RANKS:
        names = {
            stage: f"16-bit parameters and AdamW, stage {stage}, {size} ranks" for stage in FORMULA
        }
        stages = [
            stage for stage, name in names.items() if options.only is None or options.only in name
        ]
        if not stages:
            continue
        on_the_wire = _on_the_wire(stages) if size == 2 else {}
        for stage, ranks in _on_ranks(size, stages).items():
            numel = ranks[0]["numel"]
            whole, shared = FORMULA[stage]
            us = [1e6 * max(rank["seconds"] for rank in ranks)] * 3
            yield {
                "bench": "memory",
                "case": names[stage],
                "device": "cpu",
                "us": {"ZeroOptimizer": us},
                "speedup": {},
                "max_error": None,
                "rounds": 1,
                "stage": stage,
                "ranks": size,
                "parameters": numel,
                "kept_per_parameter": round(max(rank["kept"] for rank in ranks) / numel, 3),
                "formula_per_parameter": whole + shared / size,
                "kinds_per_parameter": {
                    kind: round(max(rank["kinds"][kind] for rank in ranks) / numel, 3)
                    for kind in ranks[0]["kinds"]
                },
                "sent_per_parameter": round(max(rank["sent"] for rank in ranks) / numel, 3),
                "sent_formula": 2 * SENT[stage] * (size - 1) / size,
                **(
                    {"wire_per_parameter": round(on_the_wire[str(stage)], 3)}
                    if str(stage) in on_the_wire
                    else {}
                ),
                "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
                "versions": machine.versions(),
                "commit": machine.commit(),
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    found = []
    for row in _rows(options):
        wire = f", interface {row['wire_per_parameter']:.3f}" if "wire_per_parameter" in row else ""
        print(
            f"{row['case']:<50} keeps {row['kept_per_parameter']:6.3f} B a parameter (formula "
            f"{row['formula_per_parameter']:.3f}), sends {row['sent_per_parameter']:.3f} "
            "B (formula "
            f"{row['sent_formula']:.3f}{wire})",
            flush=True,
        )
        found.append(row)
    return found
