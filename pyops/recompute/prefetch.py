"""Inputs fetched before their turn: while backward is in one part, the inputs of the part before it
are on their way.

    forward    part 1 | part 2 | part 3           calls are kept in their order
    backward            fetch 3 | part 3  | part 2  | part 1
                                | fetch 2 | fetch 1 |          copies from the host, all-gathers
                                                               over a partition group

One call's input more is whole at a time. Another order of backward costs time, never a result.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from pyops.comm.collectives.work import Work
from pyops.recompute.inputs import Keeping, Kept
from pyops.torch_private import graph_task_id

__all__ = ["Inputs", "Prefetch"]


class Inputs:
    """The kept inputs of one call; the hooks of torch.autograd.graph.saved_tensors_hooks.

    Args:
        before: The call before it, whose inputs are fetched when backward asks for these; kept
            alive until then, so that every rank of a partition group fetches it.
    """

    def __init__(self, keeping: Keeping, before: Inputs | None) -> None:
        self._keeping, self._before = keeping, before
        self.run = _run()
        self.asked = False
        self._kept: list[Kept] = []
        self._coming: dict[int, Work] = {}

    def pack(self, tensor: Tensor) -> Kept | Tensor:
        """Keep an input."""
        kept = self._keeping.pack(tensor)
        if isinstance(kept, Kept):
            self._kept.append(kept)
        return kept

    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """The input as it was; the first time this call is asked, what comes next begins to
        move."""
        if isinstance(kept, Tensor):
            return kept
        if not self.asked:
            self.asked = True
            self._start()
            before, self._before = self._before, None
            if before is not None and not before.asked:
                before._start()
        work = self._coming.pop(id(kept), None)
        return self._keeping.unpack(kept) if work is None else self._keeping.arrived(kept, work)

    def _start(self) -> None:
        if not self._coming:
            self._coming = {id(kept): self._keeping.start(kept) for kept in self._kept}


class Prefetch:
    """The order of calls: `checkpoint(..., prefetch=this)` for the parts of one model, each given
    the same object.

    What is kept of a call lives until its backward, or that of the call after it, or until the
    results of both are gone.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[Inputs] | None = None

    def inputs(self, keeping: Keeping) -> Inputs:
        """Of the next call."""
        last = None if self._last is None else self._last()
        before = last if last is not None and not last.asked and last.run == _run() else None
        found = Inputs(keeping, before)
        self._last = weakref.ref(found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_last": None}  # copies of a model have calls of their own


def _run() -> int:
    """The backward that is running, -1 for none: calls within a recomputation come before each
    other, not before others."""
    return graph_task_id()
