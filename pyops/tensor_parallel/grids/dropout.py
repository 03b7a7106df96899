"""Dropout of blocks by counters: an element falls where it would fall on one rank.

counter of an element = its index in the tensor [rows of the global batch * T, width]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel.functional.keywords import check_probability
from pyops.tensor_parallel.grids.grid import Cuts, Grid

__all__ = ["GridDropout"]


class GridDropout(nn.Module):
    """forward(x, bias=None, residual=None) -> residual + dropout(x + bias), of a rank's block x [b,
    T, width / columns]; its state is set by `pyops.tensor_parallel.set_dropout`.

    Args:
        p: probability with which an element is dropped.
        width: of the whole x.
        grid: the ranks that share it.
        cuts: of x; None: those between the blocks of a model.
    """

    state: Tensor | None

    def __init__(self, p: float, *, width: int, grid: Grid, cuts: Cuts | None = None) -> None:
        super().__init__()
        check_probability("p", p)
        self.p, self.width, self.grid = p, width, grid
        self.cuts = self.behind = cuts or grid.cuts
        self.register_buffer("state", None, persistent=False)

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """Sets the dropout of the next forward, over sequences [first_row, first_row + shape[0]) of
        shape[1] tokens each, all ranks' together; see `set_dropout`.

        Args:
            key: Of the random numbers.
            first_row: The first of these sequences in the batch of all ranks.
            shape: (B, T) of the forward.
            device: Of the state; None: the parameters'.
        """
        start = self.grid.rows(shape[0], self.cuts)[0]
        column = self.grid.columns(self.width, self.cuts).start
        first = (first_row + start) * shape[1] * self.width + column
        self.state = dropout_state(key, first, device=device)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + dropout(x + bias).

        Args:
            x: [b, T, width / columns].
            bias: [width / columns], or None.
            residual: As x, or None.
        """
        x = x if bias is None else x + bias.to(x.dtype)
        if self.training and self.p > 0.0:
            if self.state is None:
                raise RuntimeError(
                    "this dropout has no state: call set_dropout(model, ...) before each "
                    "forward, or model.eval()"
                )
            x = dropout(
                x.contiguous(), p=self.p, state=self.state, row=x.shape[-1], row_stride=self.width
            )
        return x if residual is None else residual + x

    def extra_repr(self) -> str:
        return f"p={self.p}, width={self.width}, {self.grid}"
