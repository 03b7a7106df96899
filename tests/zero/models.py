"""The model that ZeRO must get right, its data, and the one process that every layout is compared
with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ROWS", "WIDTH", "Net", "groups", "mean_loss", "one_process", "part", "rows"]

ROWS, WIDTH = 24, 10  # ROWS divides by 1, 2, 3 and by micro-batches of those


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    """Tied, frozen, unused and sometimes used parameters, a block called twice, two dtypes, a
    scalar, and a buffer."""

    def __init__(self, seed: int = 0, *, mixed: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("shift", torch.zeros(WIDTH))
        for tensor in [*self.parameters(), *self.buffers()]:
            tensor.data.normal_(0.0, 0.3, generator=generator)
        self.frozen.requires_grad_(False)
        if mixed:
            self.last.double()

    def forward(self, x: Tensor, *, sometimes: bool = True) -> Tensor:
        x = torch.tanh(self.frozen(self.first(x)) + self.shift)
        for block in (self.blocks[0], self.blocks[1], self.blocks[2], self.blocks[1]):
            x = block(x)
        x = x + self.sometimes(x) if sometimes else x
        return (
            self.tied(self.last(x.to(self.last.weight.dtype)).to(self.tied.weight.dtype))
            * self.gain
        )


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(
        ROWS, WIDTH, generator=generator
    )


def part(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    return tuple(t.chunk(size)[rank] for t in rows(step))  # type: ignore[return-value]


def mean_loss(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return nn.functional.mse_loss(model(x, **options), y)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, all else without and with another learning rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def one_process(
    make: Callable[[Iterable[Any]], torch.optim.Optimizer],
    *,
    steps: int,
    max_grad_norm: float | None = None,
    mixed: bool = True,
    sometimes_every: int = 0,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Parameters after `steps` steps on whole batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    model = Net(mixed=mixed)
    if dtype is not None:
        model.to(dtype)
    optimizer = make(groups(model))
    for step in range(steps):
        x, y = rows(step)
        if dtype is not None:
            x, y = x.to(dtype), y.to(dtype)
        optimizer.zero_grad()
        used = not sometimes_every or step % sometimes_every == 0
        mean_loss(model, x, y, sometimes=used).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(
                [p for p in model.parameters() if p.requires_grad], max_grad_norm
            )
        optimizer.step()
    torch.set_num_threads(threads)
    return {name: p.detach().clone() for name, p in model.named_parameters()}
