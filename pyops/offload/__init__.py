"""Optimizer states in host memory or in files, stepped tile by tile.

    from pyops.offload import Offloaded
    offloaded = Offloaded(AdamW(parameters, lr=3e-4), "/fast/disk")     # or "cpu"
    loss.backward(); offloaded.step()

| file | what it does |
|---|---|
| optimizer.py | Offloaded: drives an ordinary optimizer, a tile at a time |
| tiles.py, rehearsal.py | which part of which parameter is a tile; what the optimizer keeps for it,
and whether it may be cut | | stores.py, later.py | tiles in host memory, or in a file: read k + 1,
step k, write k - 1; states read when asked for | | traffic.py | gradients and parameters to the
processor and back |
| async_file.py | AsyncFile: tensors read from and written to a file while the program computes |

Nothing here uses process groups: what is stepped may be a whole model or a shard.
"""

from __future__ import annotations

from pyops.offload.async_file import AsyncFile
from pyops.offload.optimizer import Offloaded

__all__ = ["AsyncFile", "Offloaded"]
