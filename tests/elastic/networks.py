"""A small network of an embedding, residual blocks and a head, and a plain run of it that freezes:
what elastic runs equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.elastic import Policy, Sampler, indices_of
from pyops.optim import AdamW

SAMPLES, HELD_OUT, WIDTH, LABELS, IGNORED = 27, 13, 12, 5, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers(blocks: int, *, seed: int = 3) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    named = [(f"blocks.{i}", Block()) for i in range(blocks)]
    return dict([("embedding", nn.Linear(7, WIDTH)), *named, ("head", nn.Linear(WIDTH, LABELS))])


def rows(samples: Tensor, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs [n, 7] and labels [n]; those of padding are ignored."""
    generator = torch.Generator().manual_seed(11 + held_out)
    count = HELD_OUT if held_out else SAMPLES
    x, y = (
        torch.randn(count, 7, generator=generator),
        torch.randint(LABELS, (count,), generator=generator),
    )
    indices, padding = indices_of(samples)
    return x[indices], y[indices].masked_fill(padding, IGNORED)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).sum()


def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed = [p for _, p in named if p.dim() > 1]
    others = [p for _, p in named if p.dim() <= 1]
    groups = [
        {"params": some, "weight_decay": decay}
        for some, decay in ((decayed, 0.1), (others, 0.0))
        if some
    ]
    # A large eps: where a gradient is as small as its rounding, Adam would make a whole step of the
    # rounding.
    return AdamW(groups, lr=1e-2, eps=1e-3)


def lr_of(step: int) -> float:
    return 1e-2 / (1 + 0.1 * step)


MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Plain = tuple[list[float], dict[str, Tensor], dict[str, dict[str, Any]], list[int]]


def plain(
    blocks: int,
    *,
    epochs: int,
    batch: int,
    policy: Policy,
    clip: float = 0.5,
    make: MakeOptimizer = optimizer,
) -> Plain:
    """(loss of each step, weights, the optimizer's states, how many blocks were frozen in each
    epoch) of a run in one place."""
    model = nn.Sequential()
    for name, layer in layers(blocks).items():
        model.add_module(name.replace(".", "_"), layer)
    named = [
        (name.replace("_", ".", 1) if name.startswith("blocks") else name, p)
        for name, p in model.named_parameters()
    ]
    trained = make(named)
    sampler, losses, frozen, depths = Sampler(SAMPLES, batch=batch, seed=5), [], 0, []
    for _ in range(epochs):
        depths.append(frozen)
        squares, steps = [0.0] * blocks, 0
        for share in sampler.rest():
            x, y = rows(share.samples)
            trained.zero_grad()
            value = loss(model(x), y) / share.batch
            value.backward()
            for i in range(frozen, blocks):
                squares[i] += sum(
                    float(p.grad.double().square().sum()) for p in model[i + 1].parameters()
                )
            steps += 1
            norm = nn.utils.clip_grad_norm_([p for _, p in named if p.grad is not None], clip)
            assert norm > 0
            for group in trained.param_groups:
                group["lr"] = lr_of(len(losses))
            trained.step()
            losses.append(float(value.detach()))
        frozen = policy.decide([(each / steps) ** 0.5 for each in squares], frozen)
        for layer in list(model)[: frozen + 1 if frozen else 0]:
            layer.requires_grad_(False)
            for p in layer.parameters():
                p.grad = None
    states = {name: dict(trained.state[p]) for name, p in named if p.requires_grad}
    return losses, {name: p.detach() for name, p in named}, states, depths
