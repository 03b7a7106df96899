"""A training step of a GPT, ready to be called: as `pyops train` takes it, and as plain PyTorch
does.

    PyopsStep   GPT in bf16, DataParallel over one rank, AdamW with fp32 masters over flat buffers:
                pyops.train's own parts
    PlainStep   nn.Linear, nn.LayerNorm, scaled_dot_product_attention, cross_entropy; torch's fused
                AdamW, clipped. In bf16 beside fp32 masters, like ours, or in fp32 under autocast

Each has what was made of it by torch.compile as well: blocks and the head with its loss, each by
itself, so that equal blocks are compiled once. A call takes one step on the same tokens and returns
its loss and the norm of its gradient, as in training, where both are read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.config import Config, OptimizerConfig, PrecisionConfig
from pyops.data.tokenizer import ByteTokenizer
from pyops.mesh import Axes, Mesh
from pyops.models import GPTConfig
from pyops.train.setup.gpt_layers import HeadLoss
from pyops.train.setup.recipe import make_model
from pyops.train.setup.replicated import Replicated

__all__ = ["SIZES", "PlainStep", "PyopsStep", "Size"]

OPTIMIZER = OptimizerConfig(lr=2e-4)


@dataclass(frozen=True)
class Size:
    """A GPT and its batch: sequences of `length` tokens."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 50304

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def parameters(self) -> int:
        """All but the positions; the table of tokens is the head's weight too, and counts once."""
        d = self.width
        return self.vocabulary * d + self.layers * (12 * d * d + 13 * d) + 2 * d

    @property
    def flops(self) -> int:
        """Of a step, by the usual formula: 6 N + 12 L d s a token, for N parameters, L layers of
        width d, s tokens in a row.

        6 N: each parameter is multiplied and added in forward, and twice in backward. 12 L d s: so
        are scores and values, as if no token were masked. (Chowdhery et al., PaLM,
        arXiv:2204.02311, appendix B.) Nothing for what is computed twice.
        """
        return self.tokens * (6 * self.parameters + 12 * self.layers * self.width * self.length)

    def batch_of_tokens(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(
            self.vocabulary, (self.batch, self.length + 1), generator=generator
        ).to(device)


SIZES = {
    "GPT 125M": Size(12, 768, 12, 1024, batch=32),
    "GPT 1.3B": Size(
        24, 2048, 16, 2048, batch=4
    ),  # states of ours and of one rival, and activations, in 78 GiB
    "GPT tiny": Size(2, 64, 4, 32, batch=4, vocabulary=256),
}


def _as_written(compiled: bool) -> AbstractContextManager[object]:
    return nullcontext() if compiled else torch.compiler.set_stance("force_eager")


class PyopsStep:
    """A step as pyops.train takes it. compiled=False leaves what torch.compile made aside."""

    def __init__(self, size: Size, device: torch.device) -> None:
        model = GPTConfig(
            vocab_size=size.vocabulary,
            sequence_length=size.length,
            num_layers=size.layers,
            num_heads=size.heads,
            dim=size.width,
            activation="gelu_tanh",
        )
        config = Config(model=model, optimizer=OPTIMIZER, precision=PrecisionConfig(dtype="bf16"))
        self.model, self.rows, self.tokens = (
            make_model(config, Mesh(Axes()), device=device),
            size.batch_of_tokens(device),
            size.tokens,
        )
        self.start = {
            name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()
        }
        self.strategy = Replicated(config, self.model, group=None, loss=HeadLoss(ByteTokenizer()))

    def compile(self) -> None:
        """Let torch.compile have the blocks and the head."""
        for module in (*self.model.blocks, self.model.head):
            module.compile(dynamic=False)

    def __call__(self, *, compiled: bool = True) -> tuple[float, float]:
        with _as_written(compiled):
            nats = self.strategy.parallel(self.rows[:, :-1], self.rows[:, 1:], reduction="sum")
            (nats * (1 / self.tokens)).backward()
        loss = float(nats.detach()) / self.tokens
        self.strategy.optimizer.step()  # takes the norm, clips, and zeroes gradients
        return loss, float(self.strategy.optimizer.grad_norm)


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainHead(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(table.embedding_dim), table.weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(self.norm(x), self.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainGPT(nn.Module):
    """What pyops.models.GPT is by default, in torch's own modules."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(size.vocabulary, size.width),
            nn.Embedding(size.length, size.width),
        )
        self.blocks = nn.ModuleList(PlainBlock(size.width, size.heads) for _ in range(size.layers))
        self.head = PlainHead(self.tokens)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x, targets)
        return loss

    @torch.no_grad()
    def take(self, start: dict[str, Tensor]) -> None:
        """The values of pyops.models.GPT's parameters, by their names there."""
        mine = dict(self.named_parameters())
        for name, value in start.items():
            name = name.replace("embedding.token", "tokens").replace(
                "embedding.position", "positions"
            )
            mine.pop(name.replace("attention.", "").replace("mlp.", "")).copy_(value)
        if mine:
            raise AssertionError(f"the plain model has {sorted(mine)}, which pyops' has not")


class PlainStep:
    """A step by torch alone. autocast: fp32 parameters, products in bf16; else bf16 parameters
    beside fp32 masters."""

    def __init__(
        self, size: Size, device: torch.device, start: dict[str, Tensor], *, autocast: bool = False
    ) -> None:
        dtype = torch.float32 if autocast else torch.bfloat16
        with torch.device(device):
            self.model = PlainGPT(size).to(dtype)
        self.model.take(start)
        self.rows = size.batch_of_tokens(device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
        self.parameters = list(self.model.parameters())
        self.masters = self.parameters
        if not autocast:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
            for master in self.masters:
                master.grad = torch.empty_like(master)
        decayed, others = (
            [m for m in self.masters if (m.ndim >= 2) == wide] for wide in (True, False)
        )
        groups = [
            {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
        self.optimizer = torch.optim.AdamW(
            groups, lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.eps, fused=True
        )

    def compile(self) -> None:
        """Let torch.compile have the blocks and the head."""
        for module in (*self.model.blocks, self.model.head):
            module.compile(dynamic=False)

    def __call__(self, *, compiled: bool = True) -> tuple[float, float]:
        with _as_written(compiled), self.autocast:
            loss = self.model(self.rows[:, :-1], self.rows[:, 1:])
        with _as_written(compiled):
            loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.masters is not self.parameters:
            torch._foreach_copy_([m.grad for m in self.masters if m.grad is not None], gradients)
        norm = nn.utils.clip_grad_norm_(self.masters, OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        if self.masters is not self.parameters:
            torch._foreach_copy_(
                [p.detach() for p in self.parameters], [m.detach() for m in self.masters]
            )
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach()), float(norm)
