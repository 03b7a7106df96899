"""One step of a GPT whose states, gradients and parameters are spread over 2 ranks, one thread each, beside torch's FSDP2.

The model of bench_data_parallel. One sequence a rank is bound by communication, eight by computation. FSDP2 spreads what
stage 3 spreads, so it is the rival of every stage; "each rank alone" takes the same step without any communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from benchmarks.bench_data_parallel import LENGTH, SIZE, VOCABULARY, Model
from benchmarks.harness import Case, Row
from benchmarks.ranks import measure_on_ranks
from pyops.comm.communicator import Communicator
from pyops.optim import AdamW
from pyops.zero import ZeroOptimizer

__all__ = ["run"]

RATE = 1e-4


class Trainer:
    """A model with its optimizer; calling it takes one step."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer], batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Model().to(device)
        self.optimizer = make(self.model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator).to(device)

    def __call__(self) -> Tensor:
        logits = self.model(self.batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _fsdp(model: nn.Module) -> torch.optim.Optimizer:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _alone(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=RATE)


def _check(ours: Trainer, peer: Trainer) -> float:
    """Both take three steps from the same weights: the losses must agree. Their largest difference."""
    worst = max(abs(float(ours() - peer())) for _ in range(3))
    if not worst < 1e-4:
        raise AssertionError(f"losses differ by {worst} within 3 steps")
    return worst


def _facts(ours: Trainer, stage: int) -> dict[str, Any]:
    """Bytes sent in a step, and bytes kept, by this rank."""
    assert isinstance(ours.optimizer, ZeroOptimizer)
    ours()
    comm = Communicator.of()
    before = comm.bytes_sent
    ours()
    numel = sum(p.numel() for p in ours.model.parameters())
    return {
        "stage": stage, "parameters": numel, "sent_bytes_per_parameter": round((comm.bytes_sent - before) / numel, 3),
        **{f"{kind}_bytes_per_parameter": round(size / numel, 3) for kind, size in ours.optimizer.memory().items()},
    }  # fmt: skip


def _case(stage: int, batch: int, *, device: torch.device) -> Case:
    ours = Trainer(lambda model: ZeroOptimizer(model, AdamW, stage=stage, lr=RATE, weight_decay=0.01), batch, device)
    peer = Trainer(_fsdp, batch, device)
    alone = Trainer(_alone, batch, device)
    facts = {"ranks": SIZE, "threads": torch.get_num_threads(), "tokens": SIZE * batch * LENGTH}
    check = partial(_check, ours, peer)
    worst = check()
    return Case(
        bench="zero",
        name=f"GPT step, stage {stage}, {SIZE} ranks, {batch} x {LENGTH} tokens a rank",
        implementations={f"ZeroOptimizer, stage {stage}": ours, "torch FSDP2": peer, "each rank alone": alone},
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
