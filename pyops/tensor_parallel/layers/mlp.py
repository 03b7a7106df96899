"""The MLP of a transformer cut over ranks by its inner width: one sum over ranks forward, one
backward.

    x --> up (columns) --> activation --> down (rows) --> sum, + bias

Gated (Shazeer, 2020): act(gate x) * (up x), where both matrices lie in one weight [2, F / ranks, D]
with the gate first. The leading axis keeps each matrix whole when the ranks' parts are put together
along dim 1.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pyops.flat import ChannelPart, ChannelSet
from pyops.flat.channels import written
from pyops.ops.layers.activation import ACTIVATIONS, bias_activation, bias_gated
from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel.functional.keywords import check_probability, refuse_keywords
from pyops.tensor_parallel.functional.ranks import RanksLike
from pyops.tensor_parallel.layers.layer_config import ColumnConfig, MLPConfig, RowConfig
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ParallelMLP"]


class ParallelMLP(nn.Module):
    """x [..., dim] -> [..., dim]; under sequence parallelism this rank's rows [n, dim] to the same.

    Parameters: up.weight [F / ranks, D], or [2, F / ranks, D] where gated, with up.bias likewise;
    down.weight [D, F / ranks] and down.bias [D].

    Args:
        dim: D, the width of x.
        hidden: F, the inner width. Where the ranks do not divide it, it is padded with zeros: an
            activation of 0 is 0, so the padding adds nothing.
        config: see `MLPConfig`; None: its defaults.
        group: the ranks that share the layer, see `RanksLike`; None: the default process group.
        sequence_parallel: whether tokens are cut over the ranks outside of the layer.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: an unknown activation, a dropout that is no probability, a size below 1.
        TypeError: `group` is no group that this rank is in.
    """

    state: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        config: MLPConfig | None = None,
        *,
        group: RanksLike = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moved: NoReturn,
    ) -> None:
        super().__init__()
        if moved:
            refuse_keywords("ParallelMLP", moved, MLPConfig)
        config = config or MLPConfig()
        if config.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {config.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        check_probability("dropout", config.dropout)
        self.activation, self.gated = config.activation, config.gated
        self.hidden, self.dropout = hidden, config.dropout
        self.register_buffer("state", None, persistent=False)
        prefix = config.name + "." if config.name else ""
        where: dict[str, Any] = {
            "bias": config.bias,
            "group": group,
            "sequence_parallel": sequence_parallel,
            "device": device,
            "dtype": dtype,
        }
        up = ColumnConfig(
            stacked=2 if config.gated else 0,
            skip_bias=True,
            reduce=config.reduce,
            overlap=config.overlap,
            seed=config.seed,
            name=prefix + "up",
            std=config.std,
        )
        down = RowConfig(
            skip_bias=config.skip_bias,
            reduce=config.reduce,
            overlap=config.overlap,
            seed=config.seed,
            name=prefix + "down",
            std=config.std if config.out_std is None else config.out_std,
        )
        self.up = ColumnParallelLinear(dim, hidden, config=up, **where)
        self.down = RowParallelLinear(hidden, dim, config=down, **where)

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws all weights anew from the streams (seed, name + ".up.weight") and so on; biases
        become zero."""
        prefix = name + "." if name else ""
        self.up.reset_parameters(seed=seed, name=prefix + "up")
        self.down.reset_parameters(seed=seed, name=prefix + "down")

    def channels(self) -> list[ChannelSet]:
        """The inner channels: rows of up (and gate) and of their bias, columns of down."""
        rows = written("up", dim=1 if self.gated else 0, bias=self.up.bias is not None)
        return [
            ChannelSet("hidden", self.hidden, (*rows, ChannelPart("down.weight", 1, reads=True)))
        ]

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """Sets the dropout of the next forward, over sequences [first_row, first_row + shape[0]) of
        shape[1] tokens each; see `set_dropout`.

        Args:
            key: Of the random numbers.
            first_row: The first of these sequences in the batch of all ranks.
            shape: (B, T) of the forward.
            device: Of the state; None: the parameters'.
        """
        first = first_row * shape[1] * self.hidden + self.down.placements["weight"].start
        self.state = dropout_state(key, first, device=device)

    def drop(self, h: Tensor, state: Tensor) -> Tensor:
        """Dropout of what is inside, by the places of its tokens.

        Args:
            h: [..., this rank's columns].
            state: int64 [2]: the key, and the counter of the first element.
        """
        return dropout(h, p=self.dropout, state=state, row=h.shape[-1], row_stride=self.hidden)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """y; with config.skip_bias (y without the last bias, that bias or None)."""
        h, bias = self.up(x)
        bias = None if bias is None else bias.flatten().to(h.dtype)
        function = bias_gated if self.gated else bias_activation
        h = function(h, bias, activation=self.activation)
        if self.training and self.dropout > 0.0:
            if self.state is None:
                raise RuntimeError(
                    "this MLP has no dropout state: call set_dropout(model, ...) before "
                    "each forward, or eval()"
                )
            h = self.drop(h, self.state)
        result: Tensor | tuple[Tensor, Tensor | None] = self.down(h)
        return result
