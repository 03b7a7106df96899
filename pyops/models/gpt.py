"""A GPT: embedding, blocks of attention and MLP with the norms in front, and a head (Radford et al., 2019).

    tokens_BT -> embedding -> block 0 -> ... -> block L-1 -> head -> logits_BTV

    block:  x_BTD + attention(norm1(x_BTD)) = y_BTD;    y_BTD + mlp(norm2(y_BTD))

Letters of tensor names: B batch, T sequence, D model width, H heads, K width of a head (H K = D), F width inside the
MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops import random

__all__ = ["GPT", "MLP", "Attention", "Block", "Dropout", "Embedding", "GPTConfig", "Head", "Rotary"]

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "swiglu"),
    "positions": ("learned", "rotary"),
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Checked when made: ValueError names the field, its value and what would do.

    hidden: width inside the MLP; 0 means 4 dim for gelu, and for swiglu 8/3 dim rounded up to a multiple of 64, which
    has about as many weights (Shazeer, 2020, section 3).
    """

    vocab_size: int = 256
    sequence_length: int = 256
    num_layers: int = 4
    num_heads: int = 4
    dim: int = 256
    hidden: int = 0
    norm: str = "layernorm"
    activation: str = "gelu"
    positions: str = "learned"
    tied_head: bool = True
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in ("vocab_size", "sequence_length", "num_layers", "num_heads", "dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be 1 or more")
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} is {getattr(self, field)!r}; choose one of {', '.join(choices)}")
        if self.dim % self.num_heads:
            raise ValueError(f"dim is {self.dim}, which num_heads = {self.num_heads} does not divide; change one of them")
        if self.positions == "rotary" and (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"positions is 'rotary', which turns pairs, but a head is {self.dim // self.num_heads} wide "
                f"(dim {self.dim} / num_heads {self.num_heads}); make that even"
            )
        if self.hidden < 0:
            raise ValueError(f"hidden is {self.hidden}; give a width, or 0 for the usual one")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it is a probability, 0 or more and less than 1")

    @property
    def mlp_width(self) -> int:
        """F: `hidden`, or the usual width for the activation."""
        if self.hidden:
            return self.hidden
        return 4 * self.dim if self.activation == "gelu" else 64 * math.ceil(8 * self.dim / 3 / 64)


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.dim, eps=1e-5)
    return nn.LayerNorm(config.dim, eps=1e-5, bias=config.bias)


class Dropout(nn.Module):
    """Dropout whose mask is drawn ahead of the forward, keyed by where it stands and not by who computes it.

    The mask is a tensor like any other input, so the module compiles, recomputes to the same result, and drops the same
    elements of the global batch on any number of ranks. `GPT.draw_dropout` draws all masks of a model.
    """

    mask: Tensor | None

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.register_buffer("mask", None, persistent=False)

    def draw(
        self, name: str, shape: tuple[int, ...], *, seed: int, first_row: int, num_rows: int, device: torch.device
    ) -> None:
        """Draw the mask of rows [first_row, first_row + shape[0]) of a global batch of num_rows rows."""
        self.mask = random.dropout_mask(
            seed, name, shape, p=self.probability, offset=(first_row, *[0] * (len(shape) - 1)),
            global_shape=(num_rows, *shape[1:]), device=device,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        if self.mask is None or self.mask.shape != x.shape:
            raise RuntimeError(
                f"no dropout mask of shape {tuple(x.shape)} was drawn: call model.draw_dropout(...) before each "
                "forward in training, or model.eval() to run without dropout"
            )
        return x * self.mask * (1.0 / (1.0 - self.probability))


class Rotary(nn.Module):
    """Rotary positions: pair (i, i + K/2) of a head turns by position * 10000^(-2i/K) (Su et al., 2021, section 3.2)."""

    table_2TK: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length, self.width = length, width
        self.register_buffer("table_2TK", self._make_table(torch.device("cpu")), persistent=False)

    def _make_table(self, device: torch.device) -> Tensor:
        frequency_K = 10000.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angle_TK = torch.arange(self.length, dtype=torch.float64)[:, None] * frequency_K
        return torch.stack([angle_TK.cos(), angle_TK.sin()]).to(device)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        # A cast of the model to bf16 must not round the angles: the table stays float64, only the device follows.
        super()._apply(fn, recurse)
        self.table_2TK = self._make_table(self.table_2TK.device)
        return self

    def forward(self, x_BHTK: Tensor) -> Tensor:
        cos_TK, sin_TK = self.table_2TK[:, : x_BHTK.shape[2]].to(x_BHTK.dtype)
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat([a * cos_TK - b * sin_TK, a * sin_TK + b * cos_TK], dim=-1)


class Embedding(nn.Module):
    """tokens_BT -> x_BTD."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.sequence_length, config.dim) if config.positions == "learned" else None
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BT)
        if self.position is not None:
            x_BTD = x_BTD + self.position.weight[: tokens_BT.shape[1]]
        return self.dropout(x_BTD)


class Attention(nn.Module):
    """Causal self-attention: softmax(q k^T / sqrt(K)) v for each head, then one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        # Rows lie as (H, 3, K), so that a cut along the heads is a cut into contiguous rows.
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.output = nn.Linear(config.dim, config.dim, bias=config.bias)
        width = config.dim // config.num_heads
        self.rotary = Rotary(config.sequence_length, width) if config.positions == "rotary" else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, self.num_heads, 3, -1).permute(3, 0, 2, 1, 4)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        y_BHTK = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y_BHTK.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """gelu: down(gelu(up x)); swiglu: down(silu(gate x) * up x)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.mlp_width, bias=config.bias)
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.dim, config.mlp_width, bias=config.bias) if gated else None
        self.down = nn.Linear(config.mlp_width, config.dim, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        h_BTF = functional.gelu(h_BTF) if self.gate is None else functional.silu(self.gate(x_BTD)) * h_BTF
        return self.down(h_BTF)


class Block(nn.Module):
    """x_BTD -> x_BTD."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.attention, self.dropout1 = make_norm(config), Attention(config), Dropout(config.dropout)
        self.norm2, self.mlp, self.dropout2 = make_norm(config), MLP(config), Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = x_BTD + self.dropout1(self.attention(self.norm1(x_BTD)))
        return y_BTD + self.dropout2(self.mlp(self.norm2(y_BTD)))


class Head(nn.Module):
    """x_BTD -> logits_BTV."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.output(self.norm(x_BTD))


class GPT(nn.Module):
    """tokens [B, T] int64, T <= sequence_length -> logits [B, T, V] in the dtype of the parameters.

    seed: the initial parameters are drawn by (seed, parameter name), so neither the order of construction, nor the
    device, nor who else holds a part of the model changes them. Weights are normal with deviation 0.02, the projections
    that write into the residual stream 0.02 / sqrt(2 L) (Radford et al., 2019, section 2.3); biases 0, norms 1.
    """

    def __init__(
        self, config: GPTConfig, *, seed: int = 0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        if config.tied_head:
            self.head.output.weight = self.embedding.token.weight
        self.to(device=device, dtype=dtype)
        self.initialize(seed)

    def layers(self) -> list[nn.Module]:
        """The modules whose composition is forward, in order: embedding, blocks, head."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if tokens_BT.shape[1] > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {tokens_BT.shape[1]} tokens is longer than sequence_length = "
                f"{self.config.sequence_length}; cut it, or make the model with a longer one"
            )
        x = tokens_BT
        for layer in self.layers():
            x = layer(x)
        return x

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw all parameters anew."""
        residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                std = residual if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0.02
                drawn = random.normal(seed, name, tuple(parameter.shape), std=std, device=parameter.device)
                parameter.copy_(drawn)

    def draw_dropout(
        self, shape: tuple[int, int], *, seed: int, step: int, first_row: int = 0, num_rows: int | None = None
    ) -> None:
        """Draw the masks for one forward over tokens of `shape` (B, T); does nothing without dropout.

        step: keys the masks together with `seed`, so that another step drops other elements. The B sequences are rows
        [first_row, first_row + B) of the step's global batch of `num_rows` (default: of B) sequences.
        """
        if self.config.dropout == 0.0:
            return
        device = self.embedding.token.weight.device
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                module.draw(f"{name}@{step}", (*shape, self.config.dim), seed=seed, first_row=first_row,
                            num_rows=num_rows or first_row + shape[0], device=device)  # fmt: skip
