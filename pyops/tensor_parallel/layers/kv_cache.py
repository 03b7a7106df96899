"""KVCache: keys and values of the tokens that an attention has seen, so that the next one is
computed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pyops.tensor_parallel.functional.scores import Seen

__all__ = ["KVCache"]


class KVCache:
    """Of one attention, begun empty: the first forward that is given it may have any number of
    tokens, each later one has one.

    A model needs one for each of its attentions. It is of this rank's heads, and of no use to
    gradients.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Tokens so far."""
        return 0 if self._kept is None else self._kept[0].shape[1]

    def attended(
        self, k: Tensor, v: Tensor, seen: Seen, *, by_distance: bool
    ) -> tuple[Tensor, Tensor, Seen]:
        """As `extend`, with what the new tokens see.

        Args:
            k, v: Of the new tokens.
            seen: Of the layer.
            by_distance: A bias goes by the distance of query and key.
        """
        places = None
        if by_distance and len(self):
            last = torch.arange(len(self), len(self) + k.shape[1], device=k.device)
            places = (last, torch.arange(len(self) + k.shape[1], device=k.device))
        # A single token that follows sees all.
        seen = seen._replace(causal=seen.causal and len(self) == 0, places=places)
        return *self.extend(k, v), seen

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, T, G, K] of the tokens that follow -> those of all.

        Raises:
            ValueError: For several after the first forward.
        """
        if self._kept is not None:
            if k.shape[1] != 1:
                raise ValueError(
                    f"{k.shape[1]} tokens follow {len(self)} of the past; after the "
                    "first give one at a time"
                )
            k, v = (torch.cat(pair, dim=1) for pair in zip(self._kept, (k, v), strict=True))
        self._kept = k, v
        return k, v
