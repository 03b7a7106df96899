"""Buckets of which only some elements travel: those that a mask keeps.

    bucket    | w0: 1 0 0 1 0 | pad | b0: 1 1 |        kept   | w0: 2 elements | b0: 2 |
    gradient  | g . . g .     | 0   | g g     |  <->   sent   | g g            | g g   |

Both sides know the mask, so what is pruned is not sent at all, and a codec that can't say 0, such
as one of signs, has no say in it. Errors of compression are of what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyops.comm.buckets.bucket import Bucket
from pyops.comm.buckets.bucket_errors import BucketErrors, fold
from pyops.flat import FlatBuffer, FlatLayout

__all__ = ["KeptElements", "carry_errors"]


class KeptElements:
    """What is sent of each bucket.

    Args:
        buckets: The plan of buckets.
        buffers: The flat buffers.
        alive: For each buffer {number of a parameter: bool, flat, of its elements}; of others all
            are sent.

    Attributes:
        buckets, layouts: The same plan and layouts, of what is sent alone.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        buffers: Sequence[FlatBuffer],
        alive: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self._places: list[Tensor] = []
        whole = []
        for buffer, masks in zip(buffers, alive, strict=True):
            kept = torch.zeros(buffer.layout.numel, dtype=torch.bool, device=buffer.grad.device)
            for index in range(len(buffer)):
                kept[buffer.layout.slice_at(index)] = masks.get(index, True)
            whole.append(kept)
        self.layouts = [
            FlatLayout.plan(
                [
                    (name, (int(kept[buffer.layout.slice_at(index)].sum()),))
                    for index, name in enumerate(buffer.names)
                ],
                alignment=1,
            )
            for buffer, kept in zip(buffers, whole, strict=True)
        ]
        self.buckets: list[Bucket] = []
        for bucket in buckets:
            layout = self.layouts[bucket.buffer]
            first, last = bucket.parameters[0], bucket.parameters[-1]
            start, stop = layout.offsets[first], layout.slice_at(last).stop
            self.buckets.append(Bucket(bucket.buffer, start, stop, bucket.parameters))
            self._places.append(whole[bucket.buffer][bucket.start : bucket.stop])

    def gather(self, index: int, gradient: Tensor) -> Tensor:
        """What is sent of a bucket's gradient: a new tensor."""
        return gradient[self._places[index]]

    def scatter(self, index: int, gradient: Tensor, sent: Tensor) -> None:
        """Put what was sent back into the bucket's gradient; the rest becomes 0."""
        gradient.zero_().masked_scatter_(self._places[index], sent)

    def spread(self, index: int, sent: Tensor) -> Tensor:
        """As `scatter`, into new memory."""
        places = self._places[index]
        return sent.new_zeros(places.shape).masked_scatter_(places, sent)


def carry_errors(
    old: BucketErrors,
    new: BucketErrors,
    *,
    before: KeptElements | None,
    after: KeptElements | None,
) -> None:
    """Give `new` the errors of `old`: those of elements that are sent by both.

    Args:
        old: Errors of what was sent so far.
        new: Errors, 0 so far, of what will be sent.
        before: What was sent; None: everything.
        after: What will be sent; None: everything.
    """
    for index in range(len(old.buckets)):
        memory = old[index]
        fold(memory)
        whole = memory.worker if before is None else before.spread(index, memory.worker)
        new[index].worker.copy_(whole if after is None else after.gather(index, whole))
