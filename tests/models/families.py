"""One tiny model of each family, a loss of it with dropout, and steps of training; the same on
every layout of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.models import BERT, GPT, T5, BERTConfig, GPTConfig, T5Config, ViT, ViTConfig
from pyops.tensor_parallel import sync_partial_grads

__all__ = ["BATCH", "FAMILIES", "LENGTH", "gradients", "loss_of", "losses", "make"]

BATCH, LENGTH, VOCAB = (
    3,
    5,
    13,
)  # 15 tokens, which 2 and 4 ranks don't divide; nor do they the vocabulary
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "dim": 8,
    "hidden": 10,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "num_kv_heads": 2,
    "bias": False,
    "tied_head": False,
}
FAMILIES: dict[str, tuple[type, Any]] = {
    "gpt": (GPT, GPTConfig(vocab_size=VOCAB, sequence_length=LENGTH, **SIZES)),
    "llama": (GPT, GPTConfig(vocab_size=VOCAB, sequence_length=LENGTH, **SIZES, **LLAMA)),
    "bert": (BERT, BERTConfig(vocab_size=VOCAB, sequence_length=LENGTH, **SIZES)),
    "roformer": (
        BERT,
        BERTConfig(
            vocab_size=VOCAB, sequence_length=LENGTH, positions="rotary", pooled_head=False, **SIZES
        ),
    ),
    "t5": (T5, T5Config(vocab_size=VOCAB, num_buckets=4, max_distance=4, **SIZES)),
    "vit": (ViT, ViTConfig(num_labels=VOCAB, image_size=4, patch_size=2, **SIZES)),
}


def make(name: str, *, num_layers: int = 2, **options: Any) -> Any:
    model, config = FAMILIES[name]
    return model(dataclasses.replace(config, num_layers=num_layers), seed=5, **options)


def loss_of(
    model: Any,
    *,
    step: int,
    first_row: int = 0,
    rows: int = BATCH,
    reduction: str = "mean",
    through: Any = None,
) -> Tensor:
    """The loss of rows [first_row, first_row + rows) of a batch of its own, with step's dropout.

    through: called in place of the model's own forward, such as a DataParallel of it.
    """
    generator = torch.Generator().manual_seed(2)

    def tokens(length: int = LENGTH, high: int = VOCAB) -> Tensor:
        return torch.randint(high, (BATCH, length), generator=generator)[
            first_row : first_row + rows
        ]

    dtype = next(model.parameters()).dtype
    key = {"seed": 9, "step": step, "first_row": first_row}
    call = model if through is None else through
    if isinstance(model, ViT):
        images = torch.randn(BATCH, 3, 4, 4, generator=generator)[first_row : first_row + rows].to(
            dtype
        )
        model.set_dropout(rows, **key)
        return call(images, tokens(1)[:, 0], reduction=reduction)
    given, targets = tokens(), tokens()
    targets = targets.masked_fill(targets % 5 == 0, -100)
    if isinstance(model, T5):
        targets = targets[:, : LENGTH - 1]
        model.set_dropout((rows, LENGTH), (rows, LENGTH - 1), **key)
        return call(given, model.shifted(targets), targets, mask=given != 3, reduction=reduction)
    model.set_dropout((rows, LENGTH), **key)
    if isinstance(model, BERT):
        more = {"types": tokens(high=2), "mask": given != 3, "next_B": tokens(1, high=2)[:, 0]}
        return call(given, targets, **more, reduction=reduction)
    return call(given, targets, reduction=reduction)


def losses(model: nn.Module, *, steps: int, group: Any = ALONE) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-6)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step=step)
        loss.backward()
        sync_partial_grads(model, group=group)
        optimizer.step()
        found.append(loss.item())
    return found


def gradients(
    model: nn.Module, *, group: Any = ALONE
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """{name: (whole shape, offset, this rank's part of the gradient)}, and "loss"."""
    loss = loss_of(model, step=3)
    loss.backward()
    sync_partial_grads(model, group=group)
    placements = Placement.of(model)
    found = {"loss": ((), (), loss.detach())}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        place = placements.get(name, Placement.whole(p.shape, rank=0, ranks=1))
        found[name] = (place.global_shape, place.offset, place.part(p.grad).clone())
    return found
