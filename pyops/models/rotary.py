"""Rotary: tables of the angles by which rotary positions turn the pairs of a head (Su et al.,
arXiv:2104.09864, section 3.2).

pair i of K / 2, at place t, turns by t * theta^(-2i/K):      i = 0 fastest, ..., K / 2 - 1 slowest
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """forward(T, first=0) -> (cos, sin) fp32 [T, width / 2] of places first, first + 1, ..., all
    below `length`; forward(T, positions_BT=) those of the places of each token, [B, T, width / 2].

    One for all blocks of a model, computed in fp64 and kept in fp32, whatever the model is cast to.

    Args:
        stretch: As in Llama 3.1, for a model that was trained on `trained` tokens: pairs that turn
            less than `low` times over them turn that much slower, those that turn more than `high`
            times do not change.
    """

    table_2TK: Tensor

    def __init__(
        self,
        length: int,
        width: int,
        *,
        theta: float,
        stretch: float = 1.0,
        low: float = 1.0,
        high: float = 4.0,
        trained: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.length, self.width, self.theta = length, width, theta
        self.stretch, self.low, self.high, self.trained = stretch, low, high, trained
        self.register_buffer("table_2TK", self._make(device), persistent=False)

    def fill(self) -> None:
        """The table anew, where it was on the meta device or has lost its values."""
        self.table_2TK = self._make(self.table_2TK.device)

    def _make(self, device: torch.device | str | None) -> Tensor:
        pairs = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu")
        angle_K = self.theta ** (-pairs / self.width)
        if self.stretch != 1.0:
            turns_K = self.trained * angle_K / (2 * math.pi)
            kept_K = ((turns_K - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
            angle_K = angle_K * (kept_K + (1.0 - kept_K) / self.stretch)
        angle_TK = torch.arange(self.length, dtype=torch.float64, device="cpu")[:, None] * angle_K
        return torch.stack([angle_TK.cos(), angle_TK.sin()]).to(
            device or torch.get_default_device(), torch.float32
        )

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        # A cast of the model must not round the angles: of what happens to it, only the device
        # counts.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill()
        return self

    def forward(
        self, length: int, *, first: int = 0, positions_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if positions_BT is not None:
            cos_BTK, sin_BTK = self.table_2TK[:, positions_BT]
            return cos_BTK, sin_BTK
        cos_TK, sin_TK = self.table_2TK[:, first : first + length]
        return cos_TK, sin_TK
