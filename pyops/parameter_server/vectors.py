"""Vectors on the wire: how a part of the model's numbers is written.

a push                     codec(gradients + error)                        error stays here
a fetch                    codec(parameters - what the replica has)        both sides add it
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.comm.compression.codec import Codec

__all__ = ["Part"]


class Part:
    """How `numel` numbers of one part travel one way.

    Args:
        numel: Numbers in the part.
        dtype: fp32, or fp64 without a codec.
        codec: How they are written; None: as they are.
        feedback: Whether what the codec leaves out is added the next time.
    """

    def __init__(
        self, numel: int, *, dtype: torch.dtype, codec: Codec | None, feedback: bool = False
    ) -> None:
        self.numel, self.dtype, self.codec = numel, dtype, codec
        self.whole_bytes = numel * dtype.itemsize
        self.payload_bytes = self.whole_bytes if codec is None else codec.payload_bytes(numel)
        kept = codec is not None and codec.feedback and feedback
        self.error = torch.zeros(numel, dtype=torch.float32, device="cpu") if kept else None
        self._rounds = 0

    def write(self, vector: Tensor, payload: Tensor, *, whole: bool = False) -> None:
        """payload <- vector, by the codec, or as it is."""
        if whole or self.codec is None:
            payload.copy_(vector.view(torch.uint8))
            return
        self._rounds += 1
        scale = self.codec.scale_of(vector, self.error)
        self.codec.encode(vector, payload, error=self.error, scale=scale, seed=self._rounds)

    def read(self, payload: Tensor, out: Tensor, *, whole: bool = False) -> None:
        """out <- the numbers of the payload."""
        if whole or self.codec is None:
            out.view(torch.uint8).copy_(payload)
        else:
            self.codec.decode(payload, out)
