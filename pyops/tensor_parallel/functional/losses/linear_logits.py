"""LinearLogits: logits that are given as what they would be computed from, and computed for
a few tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.tensor_parallel.functional.losses.head_gradients import cast_head

__all__ = ["LinearLogits"]


@dataclass(frozen=True)
class LinearLogits:
    """Logits that are given as what they would be computed from: linear(hidden, weight, bias)."""

    hidden: Tensor
    """[..., H], the same on every rank."""
    weight: Tensor
    """[C, H], this rank's words, of the dtype of hidden unless under autocast."""
    bias: Tensor | None = None
    """[C], or None."""

    def cast(self) -> LinearLogits:
        """The same in the dtype of autocast, where it is on."""
        return LinearLogits(*cast_head(self.hidden, self.weight, self.bias))

    @property
    def tokens(self) -> int:
        """N, the number of rows of logits."""
        return self.hidden.shape[:-1].numel()

    def of_tokens(self, start: int, stop: int, columns: int) -> Tensor:
        """[n, columns], computed in fp32 at least: this rank's words, no padding.

        Args:
            start: The first token.
            stop: Behind the last one.
            columns: The number of this rank's words.
        """
        rows, weight = self.hidden[start:stop], self.weight[:columns]
        bias = None if self.bias is None else self.bias[:columns]
        if rows.dtype not in (torch.bfloat16, torch.float16):
            return torch.nn.functional.linear(rows, weight, bias)
        if rows.is_cuda:
            z = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            z = rows.float() @ weight.float().t()
        return z if bias is None else z.add_(bias)
