"""Collectives with a fixed order of summation, and gradients reduced in buckets while backward is
still running.

    from pyops.comm import all_reduce
    all_reduce(x)                                        # in place, over all ranks, by the fastest
                                                         # algorithm
    work = all_reduce(x, op="mean", async_op=True); ...; work.wait()

| folder or file | what it does |
|---|---|
| collectives | all_reduce, reduce_scatter, all_gather: the algorithms, and the choice of the
fastest |
| compression | codecs, and collectives that send their payloads: what a slow link needs |
| buckets | slices of a FlatBuffer, all-reduced as backward fills them; hooks for torch's own
wrappers |
| agreement.py, failure.py | ranks fail together, and errors say which rank, which collective, which
bucket |

The result of every collective has the same bits on all ranks. Sums have a fixed order: by rank for
two_shot and shared_memory, and for the ring one that depends on an element's position in its buffer
alone, so bucket sizes don't change a result.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyops.comm.buckets.ddp import ddp_hook
    from pyops.comm.buckets.fsdp import fsdp_reduce_scatter
    from pyops.comm.buckets.reducer import Reducer
    from pyops.comm.collectives.communicator import Communicator, release
    from pyops.comm.collectives.functional import all_gather, all_reduce, reduce_scatter
    from pyops.comm.compression.codec import Codec
    from pyops.comm.compression.compressed import (
        compressed_all_gather,
        compressed_all_reduce,
        compressed_reduce_scatter,
    )
    from pyops.comm.compression.eight_bit import FP8, Int4, Int8
    from pyops.comm.compression.error_feedback import ErrorFeedback
    from pyops.comm.compression.floats import BF16, Identity
    from pyops.comm.compression.one_bit import OneBit
    from pyops.comm.compression.power_sgd import PowerSGD
    from pyops.comm.compression.topk import TopK
    from pyops.comm.failure import CommunicationError, DisagreementError

__all__ = [
    "BF16",
    "FP8",
    "Codec",
    "CommunicationError",
    "Communicator",
    "DisagreementError",
    "ErrorFeedback",
    "Identity",
    "Int4",
    "Int8",
    "OneBit",
    "PowerSGD",
    "Reducer",
    "TopK",
    "all_gather",
    "all_reduce",
    "compressed_all_gather",
    "compressed_all_reduce",
    "compressed_reduce_scatter",
    "ddp_hook",
    "fsdp_reduce_scatter",
    "reduce_scatter",
    "release",
]

_HOMES = {
    "BF16": "compression.floats",
    "Codec": "compression.codec",
    "CommunicationError": "failure",
    "Communicator": "collectives.communicator",
    "DisagreementError": "failure",
    "ErrorFeedback": "compression.error_feedback",
    "FP8": "compression.eight_bit",
    "Identity": "compression.floats",
    "Int4": "compression.eight_bit",
    "Int8": "compression.eight_bit",
    "OneBit": "compression.one_bit",
    "PowerSGD": "compression.power_sgd",
    "Reducer": "buckets.reducer",
    "TopK": "compression.topk",
    "all_gather": "collectives.functional",
    "all_reduce": "collectives.functional",
    "compressed_all_gather": "compression.compressed",
    "compressed_all_reduce": "compression.compressed",
    "compressed_reduce_scatter": "compression.compressed",
    "ddp_hook": "buckets.ddp",
    "fsdp_reduce_scatter": "buckets.fsdp",
    "reduce_scatter": "collectives.functional",
    "release": "collectives.communicator",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: what only agrees about an error does not load the algorithms.
    if name in _HOMES:
        return getattr(importlib.import_module(f"pyops.comm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pyops.comm' has no attribute {name!r}; it has {sorted(__all__)}")
