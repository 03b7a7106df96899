"""The hidden states of two models' layers, compared.

student layer i   [B, T, H] --(projection, where the widths differ)--.
teacher layer j   [B, T, G] -----------------------------------------+--> one number a token

"cosine"       1 - cos(h, t)                               DistilBERT (Sanh et al., 2019)
"normalized"   mean of (h / |h| - t / |t|)^2               patient distillation (Sun et al., 2019)
"squared"      mean of (h - t)^2                           TinyBERT (Jiao et al., 2020)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.distill.student import blocks_of

__all__ = ["COMPARED", "compared", "recorded"]

COMPARED = ("cosine", "normalized", "squared")


@contextmanager
def recorded(model: nn.Module, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What these layers of a model return while it is called within.

    Args:
        layers: numbers of layers; negative ones count from the last.

    Raises:
        ValueError: a number that is no layer, or a model whose layers are not found.
    """
    _, blocks = blocks_of(model)
    found: dict[int, Tensor] = {}
    for number in layers:
        if not -len(blocks) <= number < len(blocks):
            raise ValueError(
                f"{type(model).__name__} has layers 0 to {len(blocks) - 1}; there is no {number}"
            )

    def keep(number: int, output: Any) -> None:
        found[number] = output[0] if isinstance(output, tuple) else output

    handles = [
        blocks[number].register_forward_hook(lambda _m, _i, out, number=number: keep(number, out))
        for number in set(layers)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def compared(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """[...], one number for each token, in fp32 at least.

    Args:
        kind: of `COMPARED`.
        student: [..., H].
        teacher: [..., H].
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    h, t = student.to(wide), teacher.to(wide)
    if kind == "cosine":
        return 1 - functional.cosine_similarity(h, t, dim=-1)
    if kind == "normalized":
        h, t = (functional.normalize(x, dim=-1) for x in (h, t))
    return (h - t).square().mean(-1)
