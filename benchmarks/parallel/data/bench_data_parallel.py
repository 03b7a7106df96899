"""One step of data-parallel training of a GPT over 2 ranks, one thread each, beside torch's
DistributedDataParallel.

8 layers, width 512, 256 tokens a sequence, 25.6 million parameters. One sequence a rank is bound by
communication, eight by computation. Each case is timed with one optimizer for both, and with each
side's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.instruments.harness import Case, Row
from benchmarks.instruments.ranks import measure_on_ranks
from pyops.data_parallel import DataParallel
from pyops.optim import AdamW

__all__ = ["Trainer", "check_losses", "run"]

SIZE = 2
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 8, 512, 8, 256, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.ln1(x)
        q, k, v = (
            w(h).view(batch, length, HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, -1)
        )
        x = x + self.wo(attended)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.ln(self.blocks(self.tokens(tokens) + self.positions.weight)))


def _torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _own_adamw(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, DataParallel)
    return AdamW([buffer.parameter for buffer in model.flat], lr=1e-4)


class Trainer:
    """A model, wrapped, with its optimizer; calling it takes one step."""

    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module],
        make_optimizer: Callable[..., Any],
        batch: int,
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        self.model = wrap(Model().to(device))
        self.optimizer = make_optimizer(self.model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator).to(device)

    def __call__(self) -> Tensor:
        logits = self.model(self.batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.model.zero_grad()
        return loss.detach()


def check_losses(ours: Trainer, peer: Trainer) -> float:
    """Both take three steps from the same weights: the losses must agree. Their largest
    difference."""
    worst = max(abs(float(ours() - peer())) for _ in range(3))
    if not worst < 1e-4:
        raise AssertionError(f"losses differ by {worst} within 3 steps")
    return worst


def _case(batch: int, own_optimizers: bool, *, device: torch.device) -> Case:
    ours = Trainer(DataParallel, _own_adamw if own_optimizers else _torch_adamw, batch, device)
    peer = Trainer(nn.parallel.DistributedDataParallel, _torch_adamw, batch, device)
    kind = "each with its own AdamW" if own_optimizers else "torch's fused AdamW for both"
    return Case(
        bench="data_parallel",
        name=f"GPT step, {SIZE} ranks, {batch} x {LENGTH} tokens a rank, {kind}",
        implementations={"DataParallel": ours, "torch DDP": peer},
        check=partial(check_losses, ours, peer),
        device=device,
        targets={"torch DDP": 1.1 if batch == 1 else 1.0},
        facts={"ranks": SIZE, "threads": torch.get_num_threads(), "tokens": SIZE * batch * LENGTH},
    )


def _cases(*, device: torch.device, options: Any) -> Iterator[Callable[[], Case]]:
    for batch in (1, 8):
        for own in (False, True):
            if (
                options.only is None
                or options.only in f"{batch} x {LENGTH} {'own' if own else 'both'}"
            ):
                yield partial(_case, batch, own, device=device)


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    return measure_on_ranks(_cases, size=SIZE, options=options)
