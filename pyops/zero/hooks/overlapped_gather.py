"""Parameters that are still on their way from their owners when step() returns: gathered while the
next forward computes.

    step()    own chunks written | gathers of all buckets start, those that forward needs first in
              front
    forward   | the model's own | block 0       | block 1       | block 2
    gathers   | a |  b  |  c  |  d  |  e |          each unit waits for its own buckets; most are
                                                    there before their turn

A unit is what stage 3 gathers together: a block of a ModuleList or Sequential. What is in no unit
is waited for when the model is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.work import Work
from pyops.torch_private import disable_dynamo
from pyops.zero.hooks.module_hook import ModuleHook
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.units import find_units

__all__ = ["OverlappedAllGather"]

Key = tuple[int, int]  # number of a buffer, number of its bucket


class OverlappedAllGather:
    """Gathers of the buckets of `flats` after a step.

    With `late`, whatever looks at parameters elsewhere than in forward calls `wait` first.

    Args:
        late: They go on while the next forward computes; else `start` waits.
    """

    def __init__(self, model: nn.Module, flats: Sequence[FlatParameters], *, late: bool) -> None:
        self.flats, self.late = list(flats), late
        self._works: dict[Key, Work] = {}
        published = [
            (f, bucket) for f, flat in enumerate(self.flats) for bucket in flat.published()
        ]
        self._order = list(reversed(published))  # backward's order, backwards
        self._hooks: list[Any] = []
        if not late:
            return
        bucket_of = {
            id(flat.parameters[index]): (f, number)
            for f, flat in enumerate(self.flats)
            for number, bucket in enumerate(flat.partition.buckets)
            for index in bucket.members
        }
        trained = {id(p) for p in model.parameters()}
        plans, _ = find_units(
            model, wanted=None, trained=trained, whole_below=0, device=torch.device("cpu")
        )
        ordered: dict[Key, None] = {}
        for plan in plans:
            of_root = [p for named in plan.parameters.values() for _, p in named]
            of_unit = (
                of_root if plan.is_root else list(plan.module.parameters())
            )  # a unit may be called by itself
            keys = {bucket_of[id(p)]: None for p in of_unit if id(p) in bucket_of}
            ordered |= keys
            self._hooks.append(
                plan.module.register_forward_pre_hook(
                    ModuleHook(partial(self._wait_for, tuple(keys)))
                )
            )
        self._order = [key for key in ordered if key in set(published)]
        self._hooks.append(model.register_state_dict_pre_hook(ModuleHook(lambda *_: self.wait())))

    def start(self, communicator: Communicator, *, async_op: bool) -> None:
        """Bring all ranks' chunks together."""
        self._works = {
            (f, bucket): self.flats[f].gather(bucket, communicator, async_op=async_op)
            for f, bucket in self._order
        }
        if not self.late:
            self.wait()

    def wait(self) -> None:
        """All parameters are there when this returns."""
        works, self._works = self._works, {}
        for work in works.values():
            work.wait()

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @disable_dynamo
    def _wait_for(self, keys: tuple[Key, ...], *_: Any) -> None:
        if self._works:
            for key in keys:
                work = self._works.pop(key, None)
                if work is not None:
                    work.wait()
