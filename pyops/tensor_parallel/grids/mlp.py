"""The MLP of a transformer on a grid: two products of blocks, with the activation between.

x --> up --> activation --> down --> y, cut as x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyops.ops.layers.activation import ACTIVATIONS, bias_activation, bias_gated
from pyops.tensor_parallel.grids.dropout import GridDropout
from pyops.tensor_parallel.grids.grid import Cuts, Grid
from pyops.tensor_parallel.grids.linear import GridLinear, GridLinearConfig
from pyops.tensor_parallel.layers.layer_config import MLPConfig

__all__ = ["GridMLP"]


class GridMLP(nn.Module):
    """x [b, ..., dim / columns] -> y of the same cuts, with the parameters of `ParallelMLP`: up
    [F, D], or [2, F, D] where gated, and down [D, F].

    Args:
        dim: D, the width of the whole x.
        hidden: F, the inner width.
        config: see `MLPConfig`; None: its defaults. Its fields reduce and overlap are those of one
            dimension: here sums are in fp32, and blocks travel beside products.
        grid: the ranks that share the layer.
        form: of the product of `down`, see `GridLinearConfig`; "abt" sends fewer bytes in 2d.
        cuts: of x; None: those between the blocks of a model.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: an unknown activation or form, a dropout that is no probability, a size below 1.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        config: MLPConfig | None = None,
        *,
        grid: Grid,
        form: str = "ab",
        cuts: Cuts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = config or MLPConfig()
        if config.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {config.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        self.activation, self.gated, self.hidden = config.activation, config.gated, hidden
        self.grid, self.cuts = grid, cuts or grid.cuts
        self.behind = self.cuts
        prefix = config.name + "." if config.name else ""
        where: dict[str, Any] = {"grid": grid, "device": device, "dtype": dtype}
        up = GridLinearConfig(
            stacked=2 if config.gated else 0,
            skip_bias=True,
            seed=config.seed,
            name=prefix + "up",
            std=config.std,
        )
        down = GridLinearConfig(
            form=form,
            skip_bias=config.skip_bias,
            seed=config.seed,
            name=prefix + "down",
            std=config.std if config.out_std is None else config.out_std,
        )
        self.up = GridLinear(dim, hidden, bias=config.bias, config=up, cuts=self.cuts, **where)
        inner = self.up.behind
        self.down = GridLinear(hidden, dim, bias=config.bias, config=down, cuts=inner, **where)
        # Its key is that of the MLP, so that the same elements fall as on one rank.
        self._dropout = (GridDropout(config.dropout, width=hidden, grid=grid, cuts=inner),)

    @property
    def state(self) -> Tensor | None:
        """Of the dropout inside."""
        return self._dropout[0].state

    @state.setter
    def state(self, state: Tensor | None) -> None:
        self._dropout[0].state = state

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """Sets the dropout of the next forward, see `GridDropout.set_dropout_state`.

        Args:
            key: Of the random numbers.
            first_row: The first of these sequences in the batch of all ranks.
            shape: (B, T) of the forward.
            device: Of the state; None: the parameters'.
        """
        self._dropout[0].set_dropout_state(key=key, first_row=first_row, shape=shape, device=device)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y; with config.skip_bias (y without the last bias, this rank's part of it or None)."""
        h, bias = self.up(x)
        function = bias_gated if self.gated else bias_activation
        h = function(h, bias, activation=self.activation)
        (dropout,) = self._dropout
        if dropout.p > 0.0:
            h = dropout.train(self.training)(h)
        result: Tensor | tuple[Tensor, Tensor | None] = self.down(h)
        return result
