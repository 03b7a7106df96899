"""A GPT as `pyops.parallel.parallelize` takes it: its layers, what they compute, and the loss that
its head gives.

    batch {"tokens_BT": ..., "targets_BT": ..., "reduction": "sum"}  ->  nats, summed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyops.data.tokenizer import Tokenizer
from pyops.models import GPT, GPTConfig
from pyops.parallel import LayeredModel
from pyops.parallel.losses import IGNORED, padded_rows

__all__ = ["HeadLoss", "batch_of", "layer_costs", "layers_of", "rows_of"]


def layers_of(model: GPT, *, seed: int) -> LayeredModel:
    """The model, and what there is to say of its layers.

    Args:
        model: On the meta device.
        seed: Of its first values.
    """
    names = ("embedding", *(f"blocks.{i}" for i in range(model.config.num_layers)), "head")
    return LayeredModel(
        model,
        names=names,
        costs=layer_costs(model.config),
        inputs="tokens_BT",
        initialize=lambda module: model.initialize(seed, only=module),
    )


def layer_costs(config: GPTConfig) -> tuple[float, ...]:
    """Of each layer, in products of a token: looking up an embedding takes none."""
    kv = 2 * config.kv_heads * config.head_width
    attention = (
        config.dim * (2 * config.num_heads * config.head_width + kv)
        + config.sequence_length * config.dim
    )
    mlp = (3 if config.activation == "swiglu" else 2) * config.dim * config.mlp_width
    blocks = [float(attention + mlp)] * config.num_layers
    return (0.0, *blocks, float(config.vocab_size * config.dim))


def rows_of(text_BT: Tensor) -> dict[str, Tensor]:
    """Tokens and targets of rows [B, T + 1] of text: the next token is the target."""
    return {"tokens_BT": text_BT[:, :-1], "targets_BT": text_BT[:, 1:]}


def batch_of(rows: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Arguments of GPT's forward for rows, of which the loss is summed."""
    return {**{name: each.to(device) for name, each in rows.items()}, "reduction": "sum"}


class HeadLoss:
    """The loss that the model's head gives: reported per byte of text, while gradients are those of
    the mean over the tokens. A `pyops.parallel.losses.CountedLoss`.

    Args:
        tokenizer: Of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, batch: Mapping[str, Any]) -> float:
        """Bytes of text that the targets stand for."""
        targets = batch["targets_BT"]
        return float(self._tokenizer.token_bytes(targets[targets != IGNORED].cpu().numpy()))

    def divisor(self, batch: Mapping[str, Any]) -> float:
        """The number of targets that count."""
        return float((batch["targets_BT"] != IGNORED).sum())

    def sum(self, outputs: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Nats: what the model returned."""
        return outputs

    def padded(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
        """Further rows are copies of the first, whose targets do not count."""
        return padded_rows(batch, rows, targets="targets_BT")
