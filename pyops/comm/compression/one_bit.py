"""The codec of one bit per number: signs, and one scale per block or per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.compression.codec import LINE, Codec, check_whole, raise_flag
from pyops.ops.communication.onebit import (
    RULES,
    onebit_decode_,
    onebit_encode_,
    onebit_encode_scaled_,
    onebit_norm,
    onebit_reencode_,
    onebit_sum_rows_,
)
from pyops.ops.communication.onebit import payload_bytes as onebit_bytes

__all__ = ["OneBit"]


@dataclass(frozen=True)
class OneBit(Codec):
    """The signs, and one scale per block. rule: "l1", the mean of |u|, loses least; "rms" is
    DeepSpeed's.

    Attributes:
        block: A multiple of 64; None: one scale for a rank's whole tensor, and one for what each
            rank sums, as DeepSpeed has it. That needs a pass over the tensor before the first bit
            can leave, so nothing overlaps.
    """

    block: int | None = 2048
    rule: str = "l1"

    def __post_init__(self) -> None:
        if self.block is not None:
            check_whole(self.block, name="block", example="2048, or None for one scale per tensor")
        if self.block is not None and (self.block < LINE or self.block % LINE):
            raise ValueError(
                f"block is {self.block}; give a multiple of {LINE}, or None for one "
                "scale per tensor"
            )
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; choose one of {RULES}")

    @property
    def name(self) -> str:
        return f"onebit(block={self.block}, rule={self.rule})"

    @property
    def multiple(self) -> int:
        """One block, or one cache line of bits where the tensor has one scale."""
        return self.block or LINE

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.block is not None

    def payload_bytes(self, n: int) -> int:
        return (
            onebit_bytes(n, block=self.block)
            if self.block is not None
            else (4 + onebit_bytes(n, block=None) if n else 0)
        )

    def scale_of(self, x: Tensor, error: Tensor | None = None) -> Tensor | None:
        if self.block is not None:
            return None
        absolute, squares, wrong = onebit_norm(x, error)
        n = max(1, x.numel())
        mean = (absolute / n) if self.rule == "l1" else (squares / n).sqrt()
        return torch.where(wrong > 0, torch.nan, mean).float().view(1)

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        error: Tensor | None = None,
        flag: Tensor | None = None,
        scale: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        if self.block is not None:
            onebit_encode_(payload, x, error, flag, block=self.block, rule=self.rule)
            return
        whole = scale if scale is not None else self.scale_of(x, error)
        assert whole is not None
        if x.numel():
            payload[:4].copy_(whole.view(torch.uint8))
            onebit_encode_scaled_(payload[4:], x, error, whole)
        raise_flag(flag, whole.isfinite())

    def decode(self, payload: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        if self.block is not None:
            onebit_decode_(out, payload, block=self.block, scale=scale)
        elif out.numel():
            onebit_decode_(out, payload[4:], payload[:4].view(torch.float32), scale=scale)

    def sum_rows(self, out: Tensor, payloads: Sequence[Tensor], *, scale: float = 1.0) -> None:
        if self.block is not None:
            onebit_sum_rows_(out, payloads, block=self.block, scale=scale)
        elif out.numel():
            scales = torch.cat([p[:4] for p in payloads]).view(torch.float32)
            onebit_sum_rows_(out, [p[4:] for p in payloads], scales, scale=scale)

    def reencode(
        self,
        payload: Tensor,
        payloads: Sequence[Tensor],
        *,
        n: int,
        scale: float = 1.0,
        error: Tensor | None = None,
        flag: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        if self.block is None:
            super().reencode(payload, payloads, n=n, scale=scale, error=error, flag=flag)
        else:
            onebit_reencode_(
                payload, payloads, error, flag, n=n, block=self.block, scale=scale, rule=self.rule
            )
