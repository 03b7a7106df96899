"""Activation recomputation: a part of the model keeps its inputs alone, and runs a second time when
backward comes by.

    from pyops import recompute
    y = recompute.checkpoint(block, x)                              # in place of block(x)
    recompute.apply(model, ["blocks.*"], offload="cpu")             # by a list of modules; model(x)
                                                                    # stays as it is
    recompute.apply(model, ["blocks.*"], arena=recompute.Arena(1 << 30))
                                                                    # inputs in one piece of memory,
                                                                    # taken once

    forward  x -> block -> y     kept: x, or its n-th part, or a copy in host memory, or in an arena
    backward x -> block again, same random numbers -> what the gradient needs -> gradient

| file | what it does |
|---|---|
| checkpointing.py | checkpoint: one call |
| inputs.py | how the inputs are kept: split over a group, in host memory, in an arena |
| prefetch.py | Prefetch: inputs fetched while backward is still in the part after theirs |
| selection.py | apply, remove: every call of chosen modules |

Results and gradients have the same bits as without it. Nothing runs a backward within a backward,
so gradient hooks of DataParallel, of ZeRO and of torch's own wrappers see one ordinary backward.
Chen et al., arXiv:1604.06174; Rajbhandari et al., ZeRO, arXiv:1910.02054, section 6 (partitioned
activations, contiguous memory).
"""

from __future__ import annotations

from pyops.recompute.arena import Arena
from pyops.recompute.checkpointing import checkpoint
from pyops.recompute.prefetch import Prefetch
from pyops.recompute.selection import apply, remove

__all__ = ["Arena", "Prefetch", "apply", "checkpoint", "remove"]
