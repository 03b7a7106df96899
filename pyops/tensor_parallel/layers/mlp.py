"""The MLP of a transformer cut over ranks by its inner width: one sum over ranks forward, one
backward.

    x --> up (columns) --> activation --> down (rows) --> sum, + bias

Gated (Shazeer, 2020): act(gate x) * (up x), where both matrices lie in one weight [2, F / ranks, D]
with the gate first. The leading axis keeps each matrix whole when the ranks' parts are put together
along dim 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.ops.layers.activation import ACTIVATIONS, bias_activation, bias_gated
from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ParallelMLP"]


class ParallelMLP(nn.Module):
    """x [..., dim] -> [..., dim]; under sequence parallelism this rank's rows [n, dim] to the same.

    hidden: F, padded with zeros where the ranks don't divide it; an activation of 0 is 0, so the
    padding stays out of it. activation: "gelu" (erf), "gelu_tanh", "relu" or "silu". dropout: of
    what the activation gives, in training, by counters over [rows of the global batch * T, F] (see
    pyops.tensor_parallel.functional.dropout). skip_bias: returns
    (y without the last bias, bias or None).
    Parameters: up.weight [F / ranks, D], or [2, F / ranks, D] when gated, up.bias likewise;
    down.weight [D, F / ranks], down.bias [D]. The rest as in ColumnParallelLinear; out_std is the
    deviation of down.weight, by default std.
    """

    state: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        skip_bias: bool = False,
        reduce: str = "fp32",
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
        std: float = 0.02,
        out_std: float | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(
                f"dropout is {dropout}; it is a probability, 0 or more and less than 1"
            )
        self.activation, self.gated, self.hidden, self.dropout = activation, gated, hidden, dropout
        self.register_buffer("state", None, persistent=False)
        prefix = name + "." if name else ""
        shared: dict[str, Any] = {
            "bias": bias,
            "group": group,
            "sequence_parallel": sequence_parallel,
            "reduce": reduce,
            "overlap": overlap,
            "device": device,
            "dtype": dtype,
            "seed": seed,
        }
        self.up = ColumnParallelLinear(
            dim,
            hidden,
            stacked=2 if gated else 0,
            skip_bias=True,
            name=prefix + "up",
            std=std,
            **shared,
        )
        self.down = RowParallelLinear(
            hidden,
            dim,
            skip_bias=skip_bias,
            name=prefix + "down",
            std=std if out_std is None else out_std,
            **shared,
        )

    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draw all weights anew from the streams (seed, name + ".up.weight") and so on; biases
        become zero."""
        prefix = name + "." if name else ""
        self.up.reset_parameters(seed=seed, name=prefix + "up")
        self.down.reset_parameters(seed=seed, name=prefix + "down")

    def take_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """The state for sequences [first_row, first_row + shape[0]) of shape[1] tokens each; see
        `set_dropout`."""
        first = first_row * shape[1] * self.hidden + self.down.placements["weight"].start
        self.state = dropout_state(key, first, device=device)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
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
            h = dropout(
                h, p=self.dropout, state=self.state, row=h.shape[-1], row_stride=self.hidden
            )
        return self.down(h)
