"""Dropout by counters: which elements fall is a function of (seed, name, step) and of their place
in the global batch.

    counter of an element = its index in the tensor [rows of the global batch * T, D]

A rank needs the counter of its first element only.

So the mask is the same on any layout of ranks, with sequence parallelism or without; it is drawn
anew in backward and never stored. The bits are those of `pyops.random.dropout_mask`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.ops.layers.dropout import bias_dropout_add, dropout_state
from pyops.random import key_of
from pyops.tensor_parallel.functional.keywords import check_probability
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["Dropout", "set_dropout"]


class Dropout(nn.Module):
    """forward(x, bias=None, residual=None) -> residual + dropout(x + bias), of x [B, T, width], or
    this rank's rows [n, width] of the flattened tokens under sequence parallelism.

    state: int64 [2], (key, index of the first element), set before each forward by `set_dropout`; a
    fresh tensor each time, so that a recomputed forward with the old one drops the same elements.
    In eval mode, or with p 0, nothing is dropped and no state is needed.

    Args:
        p: probability with which an element is dropped.
        width: of x.
        group: see `RanksLike`; None: the default process group.
        sequence_parallel: whether x is this rank's tokens only.
    """

    state: Tensor | None

    def __init__(
        self,
        p: float,
        *,
        width: int,
        group: RanksLike = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        check_probability("p", p)
        self.p, self.width, self.ranks = p, width, Ranks.of(group)
        self.sequence_parallel = sequence_parallel and self.ranks.size > 1
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
        shape[1] tokens each; see `set_dropout`.

        Args:
            key: Of the random numbers.
            first_row: The first of these sequences in the batch of all ranks.
            shape: (B, T) of the forward.
            device: Of the state; None: the parameters'.
        """
        first = first_row * shape[1] + (
            self.ranks.start(shape[0] * shape[1]) if self.sequence_parallel else 0
        )
        self.state = dropout_state(key, first * self.width, device=device)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """dropout(x + bias) + residual.

        Args:
            x: [..., width].
            bias: [width], or None.
            residual: As x, or None.
        """
        p = self.p if self.training else 0.0
        if p > 0.0 and self.state is None:
            raise RuntimeError(
                "this dropout has no state: call set_dropout(model, ...) before each "
                "forward, or model.eval()"
            )
        bias = bias if bias is None else bias.to(x.dtype)
        return bias_dropout_add(x, bias, residual, p=p, state=self.state if p > 0.0 else None)

    def extra_repr(self) -> str:
        return f"p={self.p}, width={self.width}"


def set_dropout(
    model: nn.Module,
    *,
    seed: int,
    step: int,
    shape: tuple[int, int],
    first_row: int = 0,
    prefix: str = "",
    device: torch.device | str | None = None,
) -> None:
    """Sets the state of every dropout of `model` for one forward over tokens of `shape` (B, T).

    Streams are keyed by (seed, name@step), where the name is that of the module in the model, after
    `prefix`. An encoder and a decoder with sequences of different lengths are set one by one, each
    with its own prefix.

    Args:
        model: every module in it that has `set_dropout_state` is set.
        seed: of all streams.
        step: of the training; another step drops other elements.
        shape: (B, T) of the forward's tokens.
        first_row: the B sequences are rows [first_row, first_row + B) of the step's global batch.
        prefix: put before the modules' names.
        device: of the states; None: that of the model's first parameter.
    """
    where = (
        torch.device(device)
        if device is not None
        else next((p.device for p in model.parameters()), None)
    )
    for name, module in model.named_modules():
        if hasattr(module, "set_dropout_state"):
            module.set_dropout_state(
                key=key_of(seed, f"{prefix}{name}@{step}"),
                first_row=first_row,
                shape=shape,
                device=where,
            )
