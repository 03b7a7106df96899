"""Stochastic depth: what a block adds is left out for some images, so that a network is on average
less deep in training (Huang et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel.functional.keywords import check_probability

__all__ = ["StochasticDepth"]


class StochasticDepth(nn.Module):
    """forward(x [B, ...]) -> x / (1 - p) for images that are kept, 0 for the others.

    Which ones is a function of the key and of the image's number in the batch of all ranks, so that
    every layout of ranks leaves out the same. In eval mode, or with p 0, all are kept.

    Args:
        p: probability with which an image is left out.
    """

    state: Tensor | None

    def __init__(self, p: float) -> None:
        super().__init__()
        check_probability("p", p)
        self.p = p
        self.register_buffer("state", None, persistent=False)

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """Sets what the next forward leaves out, of images [first_row, first_row + shape[0]); see
        `pyops.tensor_parallel.set_dropout`.

        Args:
            key: Of the random numbers.
            first_row: The first of these images in the batch of all ranks.
            shape: Its first number counts the images of the forward.
            device: Of the state; None: the parameters'.
        """
        self.state = dropout_state(key, first_row, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.state is None:
            raise RuntimeError(
                "this stochastic depth has no state: call set_dropout(model, ...) before each "
                "forward, or model.eval()"
            )
        kept = dropout(x.new_ones(len(x), dtype=torch.float32), p=self.p, state=self.state)
        return x * kept.to(x.dtype).view(-1, *[1] * (x.dim() - 1))

    def extra_repr(self) -> str:
        return f"p={self.p}"
