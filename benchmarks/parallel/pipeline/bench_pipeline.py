"""Steps of a pipeline on ranks of one thread each, beside torch.distributed.pipelining with the
same stages and micro-batches.

    tiny layers   what a pipeline costs: a step less what its stages take by themselves, for each
                  (micro-batch, stage) cell
    GPT           the model of bench_data_parallel on 2 ranks, 4 micro-batches, and what the
                  simulator says from its profile
    slow links    layers that sleep, every message later by a part of a forward: eager 1f1b beside
                  1f1b, and simulated

Every case compares losses first. A GPT's step has the optimizer's in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from benchmarks.parallel.data.bench_data_parallel import LAYERS, LENGTH, VOCABULARY, WIDTH
from benchmarks.parallel.pipeline.pipeline_models import (
    SLEEP,
    Sleeps,
    Tiny,
    gpt_layers,
    token_loss,
)
from benchmarks.parallel.pipeline.pipeline_steps import Ours, StagesAlone, Theirs
from pyops.mesh import ALONE
from pyops.pipeline import Costs, Pipeline, Schedule, profile, schedule, simulate
from pyops.pipeline.transport.channel import ReceiveChannel

__all__ = ["run"]

SIZE, SLOW = 2, 4  # ranks
STAGES = 4  # of the pipeline in one process
BATCH, MICROBATCHES = 8, 4  # of the GPT


def _same_losses(*several: Callable[[], float]) -> float:
    """Each takes three steps from the same weights; the last rank knows all losses. Their largest
    difference."""
    worst = 0.0
    for _ in range(3):
        found = [one() for one in several]
        if dist.get_rank() == dist.get_world_size() - 1:
            worst = max(worst, max(found) - min(found))
    if not worst < 1e-4:
        raise AssertionError(f"losses differ by {worst} within 3 steps")
    return worst


def _tiny(name: str, microbatches: int, *, device: torch.device) -> Case:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Tiny() for _ in range(SIZE)]

    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(2 * microbatches, 8, generator=generator) for _ in range(2))
    made = schedule(name, num_stages=SIZE, num_microbatches=microbatches)
    ours = Ours(layers(), made, nn.functional.mse_loss, x, target, steps=False)
    theirs = Theirs(layers(), name, microbatches, nn.functional.mse_loss, x, target, steps=False)
    worst = _same_losses(ours, theirs)
    return Case(
        bench="pipeline",
        name=f"{name}, tiny layers, {SIZE} ranks, {microbatches} micro-batches",
        implementations={
            "Pipeline": ours,
            "torch pipelining": theirs,
            "stages alone": StagesAlone(layers(), microbatches, x, target),
        },
        check=lambda: worst,
        device=device,
        facts={"ranks": SIZE, "cells": SIZE * microbatches},
    )


def _one_process(microbatches: int, *, device: torch.device) -> Case:
    """Four stages in one process, beside torch's schedule of several stages on a rank."""

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Tiny() for _ in range(STAGES)]

    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(2 * microbatches, 8, generator=generator) for _ in range(2))
    pipeline = Pipeline(
        layers(),
        schedule=schedule("1f1b", num_stages=STAGES, num_microbatches=microbatches),
        group=ALONE,
        loss=nn.functional.mse_loss,
    )
    stages: list[Any] = [
        pipelining.PipelineStage(layer, i, STAGES, device) for i, layer in enumerate(layers())
    ]
    peer = pipelining.ScheduleInterleaved1F1B(
        stages, n_microbatches=microbatches, loss_fn=nn.functional.mse_loss
    )

    def theirs() -> float:
        losses: list[Tensor] = []
        peer.step(x, target=target, losses=losses)
        return float(torch.stack(losses).detach().mean())

    def ours() -> float:
        return float(pipeline.step(x, target))

    worst = _same_losses(ours, theirs)
    alone = layers()

    def cells() -> None:
        for rows, wanted in zip(
            x.tensor_split(microbatches), target.tensor_split(microbatches), strict=True
        ):
            leaves, outputs, y = [], [], rows
            for layer in alone:
                leaves.append(y.detach().requires_grad_())
                outputs.append(y := layer(leaves[-1]))
            (nn.functional.mse_loss(y, wanted) / microbatches).backward()
            for leaf, output in zip(reversed(leaves[1:]), reversed(outputs[:-1]), strict=True):
                output.backward(leaf.grad)

    return Case(
        bench="pipeline",
        name=f"1f1b, tiny layers, {STAGES} stages in one process, {microbatches} micro-batches",
        implementations={"Pipeline": ours, "torch pipelining": theirs, "stages alone": cells},
        check=lambda: worst,
        device=device,
        facts={"ranks": 1, "cells": STAGES * microbatches},
    )


def _gpt(name: str, *, device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    x, target = rows[:, :-1], rows[:, 1:]
    made = schedule(name, num_stages=SIZE, num_microbatches=MICROBATCHES)
    ours = Ours(gpt_layers(), made, token_loss, x, target, steps=True)
    theirs = Theirs(gpt_layers(), "1f1b", MICROBATCHES, token_loss, x, target, steps=True)
    several: dict[str, Any] = {"Pipeline": ours, "torch Schedule1F1B": theirs}
    if name != "1f1b":
        plain = schedule("1f1b", num_stages=SIZE, num_microbatches=MICROBATCHES)
        several["Pipeline, 1f1b"] = Ours(gpt_layers(), plain, token_loss, x, target, steps=True)
    worst = _same_losses(*several.values())
    return Case(
        bench="pipeline",
        name=f"GPT step, {name}, {SIZE} ranks, {BATCH} x {LENGTH} tokens, {MICROBATCHES} "
        "micro-batches",
        implementations=several,
        check=lambda: worst,
        device=device,
        targets={"torch Schedule1F1B": 1.1 if name == "zb1p" else 1.0},
        facts={"ranks": SIZE, "tokens": BATCH * LENGTH, **_predicted(made, ours, x, target)},
    )


def _predicted(made: Schedule, ours: Ours, x: Tensor, target: Tensor) -> dict[str, Any]:
    """Milliseconds of forward and backward of a step: simulated from the layers' own profile, taken
    on both ranks at once, and measured; the median of several."""
    layers = gpt_layers()
    rows = BATCH // MICROBATCHES
    found = profile(layers, x[:rows], loss=token_loss, target=target[:rows], group=dist.group.WORLD)
    costs = found.costs(
        ours.pipeline.boundaries, split=made.splits_backward, latency=_seconds_of_a_message(rows)
    )
    simulated = simulate(made, costs).makespan
    with ours.pipeline.recording() as timelines:
        for _ in range(7):
            ours()
    measured = sorted(timeline.makespan for timeline in timelines)[len(timelines) // 2]
    return {
        "predicted_ms": round(1e3 * simulated, 1),
        "measured_ms": round(1e3 * measured, 1),
        "layers": LAYERS,
    }


def _seconds_of_a_message(rows: int) -> float:
    """How long the activations of a micro-batch take to the other rank, one way: the median of
    several."""
    message, samples = torch.zeros(rows, LENGTH, WIDTH), []
    for _ in range(15):
        dist.barrier()
        begin = time.perf_counter()
        for first in (0, 1):
            if dist.get_rank() == first:
                dist.send(message, 1 - first)
            else:
                dist.recv(message, first)
        samples.append((time.perf_counter() - begin) / 2)
    return sorted(samples)[len(samples) // 2]


def _slow(part: float, *, device: torch.device) -> Case:
    microbatches = 16
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(microbatches, 8, generator=generator) for _ in range(2))
    several, expected = [], []
    for warmup in ("b", "a"):
        made = schedule("1f1b", num_stages=SLOW, num_microbatches=microbatches, warmup=warmup)
        ours = Ours(
            [Sleeps() for _ in range(SLOW)], made, nn.functional.mse_loss, x, target, steps=False
        )
        for channel in ours.pipeline.incoming_channels():
            assert isinstance(channel, ReceiveChannel)
            channel.delay_ns = round(part * SLEEP * 1e9)
        several.append(ours)
        expected.append(
            simulate(
                made, Costs(forward=1, input_gradient=1, weight_gradient=1, latency=part)
            ).makespan
        )
    worst = _same_losses(*several)
    return Case(
        bench="pipeline",
        name=f"1f1b, layers that sleep, {SLOW} ranks, messages later by {part:g} of a forward",
        implementations={"eager 1f1b": several[0], "1f1b": several[1]},
        check=lambda: worst,
        device=device,
        facts={
            "ranks": SLOW,
            "simulated": round(expected[1] / expected[0], 3),
            "micro_batches": microbatches,
        },
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    several: list[tuple[str, Callable[[], Case]]] = []
    if dist.get_world_size() == 1:
        several += [(f"one process {m}", partial(_one_process, m, device=device)) for m in (4, 16)]
    elif dist.get_world_size() == SIZE:
        several += [
            (f"tiny {name} {m}", partial(_tiny, name, m, device=device))
            for name in ("gpipe", "1f1b")
            for m in (4, 16)
        ]
        several += [
            (f"GPT {name}", partial(_gpt, name, device=device)) for name in ("1f1b", "zb1p")
        ]
    else:
        several += [(f"slow {part:g}", partial(_slow, part, device=device)) for part in (0.1, 0.3)]
    return (make for name, make in several if options.only is None or options.only in name)


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    if options.device.type != "cpu":
        print("the pipeline bench runs on CPU ranks only")
        return []
    sizes = {"one": 1, "slow": SLOW}
    chosen = [size for word, size in sizes.items() if options.only and word in options.only] or [
        SIZE
    ]
    rows = [
        row
        for size in (chosen if options.only else (1, SIZE, SLOW))
        for row in measure_on_ranks(_cases, size=size, options=options)
    ]
    for row in rows:
        if "stages alone" in row["us"]:
            alone = row["us"]["stages alone"][1]
            row["overhead_us_a_cell"] = {
                name: round((us[1] - alone) / row["cells"], 1)
                for name, us in row["us"].items()
                if name != "stages alone"
            }
            print(row["case"], "overhead of a cell, us:", row["overhead_us_a_cell"])
        if "predicted_ms" in row:
            print(row["case"], {key: row[key] for key in ("predicted_ms", "measured_ms")})
        if "simulated" in row:
            print(row["case"], "simulated:", row["simulated"], "measured:", row["speedup"])
    return rows
