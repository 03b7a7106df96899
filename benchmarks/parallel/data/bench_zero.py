"""One step of a GPT whose states, gradients and parameters are spread over 2 ranks, one thread
each, beside torch's FSDP2.

The model of bench_data_parallel. One sequence a rank is bound by communication, eight by
computation. FSDP2 spreads what stage 3 spreads, so it is the rival of every stage; "each rank
alone" takes the same step without any communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from benchmarks.parallel.data.bench_data_parallel import LENGTH, SIZE, Trainer, check_losses
from pyops.comm.collectives.communicator import Communicator
from pyops.optim import AdamW
from pyops.zero import ZeroConfig, ZeroOptimizer

__all__ = ["run"]

RATE = 1e-4


def _trainer(
    make: Callable[[nn.Module], torch.optim.Optimizer], batch: int, device: torch.device
) -> Trainer:
    """The other bench's, of a model that its optimizer wraps if anything does."""
    return Trainer(lambda model: model, make, batch, device)


def _fsdp(model: nn.Module) -> torch.optim.Optimizer:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _alone(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=RATE)


def _facts(ours: Trainer, stage: int) -> dict[str, Any]:
    """Bytes sent in a step, and bytes kept, by this rank."""
    assert isinstance(ours.optimizer, ZeroOptimizer)
    ours()
    comm = Communicator.of()
    before = comm.bytes_sent
    ours()
    numel = sum(p.numel() for p in ours.model.parameters())
    return {
        "stage": stage,
        "parameters": numel,
        "sent_bytes_per_parameter": round((comm.bytes_sent - before) / numel, 3),
        **{
            f"{kind}_bytes_per_parameter": round(size / numel, 3)
            for kind, size in ours.optimizer.memory().items()
        },
    }


def _case(stage: int, batch: int, *, device: torch.device) -> Case:
    ours = _trainer(
        lambda model: ZeroOptimizer(
            model, AdamW, ZeroConfig(stage=stage), lr=RATE, weight_decay=0.01
        ),
        batch,
        device,
    )
    peer = _trainer(_fsdp, batch, device)
    alone = _trainer(_alone, batch, device)
    facts = {"ranks": SIZE, "threads": torch.get_num_threads(), "tokens": SIZE * batch * LENGTH}
    check = partial(check_losses, ours, peer)
    worst = check()
    return Case(
        bench="zero",
        name=f"GPT step, stage {stage}, {SIZE} ranks, {batch} x {LENGTH} tokens a rank",
        implementations={
            f"ZeroOptimizer, stage {stage}": ours,
            "torch FSDP2": peer,
            "each rank alone": alone,
        },
        check=lambda: worst,
        device=device,
        targets={"torch FSDP2": 1.5 if batch == 1 else 1.0},
        facts={**facts, **_facts(ours, stage)},
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    for batch in (1, 8):
        for stage in (1, 2, 3):
            if options.only is None or options.only in f"stage {stage}, {batch} x {LENGTH}":
                yield partial(_case, stage, batch, device=device)


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    return measure_on_ranks(_cases, size=SIZE, options=options)
