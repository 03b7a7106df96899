"""What replicas in tests train, and how they die."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.healing import Part, Quorum, QuorumConfig

ROWS, STEPS = 7, 9
# No moment may have to wait for the timeout of collectives, which is longer than a test.
WAITS = {"lease": 3.0, "timeout": 300.0, "meeting_timeout": 400.0}


def quorum_config(start_replicas: int, copy_every: int = 1) -> QuorumConfig:
    return QuorumConfig(start_replicas=start_replicas, copy_every=copy_every, **WAITS)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 4, generator=draws, dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def squares(module: nn.Module, part: Part) -> tuple[Tensor, int]:
    rows = part.rows(ROWS)
    inputs, targets = batch(part.step)
    error = module(inputs[rows]) - targets[rows]
    return error.square().sum(), len(inputs[rows])


def one_process() -> tuple[list[float], list[Tensor]]:
    """Losses, and the parameters at the end."""
    model = net(0)
    optimizer = adam(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = squares(model, Part(step, 0, 1))[0] / ROWS
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stores(count: int) -> list[dist.TCPStore]:
    return [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)
    ]


def reached(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


def until_somebody_waits(quorum: Quorum) -> None:
    until = time.monotonic() + 90
    while not quorum.somebody_waits() and time.monotonic() < until:
        time.sleep(0.02)
