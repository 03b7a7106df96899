"""LowRank: what an adapter adds to a linear layer whose weight stays as it is (LoRA, Hu et al.,
arXiv:2106.09685).

    y = x W^T + scale drop(x) A^T B^T                A [r, in], B [out, r]

    layer cut by columns    A whole on each rank, B cut as W; the gradient of A is a part
    layer cut by rows       A cut as W, B whole; the gradient of B is a part

x A^T goes beside x W^T, and what is added is added before the layer's own sum over ranks: no
message more than without it, but for one of the gradient of drop(x) where there is dropout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops import random
from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.ops.layers.dropout import dropout, dropout_state
from pyops.tensor_parallel.functional.dropout import Dropout

__all__ = ["LowRank", "PartDropout"]


class PartDropout(Dropout):
    """Dropout of columns [start, start + n) of tokens of `width` elements.

    Args:
        p: probability with which an element is dropped.
        width: of whole tokens.
        start: the first column that this rank has.
    """

    def __init__(self, p: float, *, width: int, start: int) -> None:
        super().__init__(p, width=width, group=ALONE)
        self.start = start

    def set_dropout_state(
        self,
        *,
        key: int,
        first_row: int,
        shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        """See `Dropout.set_dropout_state`."""
        self.state = dropout_state(
            key, first_row * shape[1] * self.width + self.start, device=device
        )

    def forward(
        self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """The columns of x that are kept, scaled."""
        if not self.training or self.p == 0.0 or self.state is None:
            return super().forward(x, bias, residual)
        return dropout(x, p=self.p, state=self.state, row=x.shape[-1], row_stride=self.width)


class LowRank(nn.Module):
    """A and B of one layer, which computes with them; `enabled` says whether it does.

    Args:
        shapes: of A [r, in] and B [.., out, r], as this rank has them.
        placements: of both, in a layer that ranks share.
        scale: alpha / r.
        drop: applied to x before A; None: nothing is dropped.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        placements: Mapping[str, Placement] | None = None,
        scale: float,
        drop: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.drop, self.enabled = scale, drop, True
        if placements:
            self.placements = dict(placements)
        self.A, self.B = (
            nn.Parameter(torch.empty(shapes[name], device=device, dtype=dtype)) for name in "AB"
        )

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[0]

    @property
    def drops(self) -> bool:
        """Whether the next forward drops elements of x."""
        return self.drop is not None and self.training

    @torch.no_grad()
    def reset_parameters(self, *, seed: int = 0, name: str = "") -> None:
        """Draws A anew, uniform as the weight of a linear layer, from the stream (seed, name +
        ".A"); B becomes zero: nothing is added."""
        place = getattr(self, "placements", {}).get("A")
        if place is None:
            place = Placement.whole(self.A.shape, rank=0, ranks=1)
        self.A.zero_()
        self.B.zero_()
        part = place.part(self.A.data)
        values = random.uniform(
            seed,
            f"{name}.A",
            part.shape,
            offset=place.offset,
            global_shape=place.global_shape,
            device=part.device,
        )
        part.copy_((2 * values - 1) * place.global_shape[1] ** -0.5)

    def inputs(self, x: Tensor) -> Tensor:
        """drop(x)."""
        return self.drop(x) if self.drop is not None and self.training else x

    def factor(self, name: str, x: Tensor) -> Tensor:
        """A or B as a matrix in the dtype of x."""
        found: Tensor = self.A if name == "A" else self.B.flatten(0, -2)
        autocast = torch.is_autocast_enabled(x.device.type)
        return found if autocast or found.dtype == x.dtype else found.to(x.dtype)

    def down(self, x: Tensor) -> Tensor:
        """drop(x) A^T."""
        return functional.linear(self.inputs(x), self.factor("A", x))

    def add(self, y: Tensor, h: Tensor) -> Tensor:
        """y + scale h B^T."""
        rows = torch.addmm(
            y.flatten(0, -2), h.flatten(0, -2), self.factor("B", h).t(), alpha=self.scale
        )
        return rows.view(y.shape)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y + scale drop(x) A^T B^T, where every rank has the whole layer."""
        return self.add(y, self.down(x)) if self.enabled else y

    @torch.no_grad()
    def delta(self) -> Tensor:
        """scale B A, this rank's part of what is added to the weight, [.., out, in], in fp32 (fp64
        for fp64)."""
        wide = torch.promote_types(self.A.dtype, torch.float32)
        return self.scale * (self.B.to(wide) @ self.A.to(wide))

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}, enabled={self.enabled}"
