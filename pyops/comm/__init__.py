"""Collectives with a fixed order of summation, and gradients reduced in buckets while backward is still running.

    from pyops.comm import all_reduce
    all_reduce(x)                                        # in place, over all ranks, by the fastest algorithm
    work = all_reduce(x, op="mean", async_op=True); ...; work.wait()

| file | what it does |
|---|---|
| collectives.py | all_reduce, reduce_scatter, all_gather: what a user calls |
| ring.py, two_shot.py, shared_memory.py | the algorithms, over a small transport |
| transport.py | sends and receives: of a process group, or among threads as virtual ranks |
| arithmetic.py | sums of any dtype: fp32 inside for 16-bit, one rounding |
| communicator.py, probe.py, work.py | what is kept for a group; measured costs for "auto"; asynchronous calls |
| codec.py, compressed.py, compressed_shots.py, error_feedback.py | what a slow link needs: few bits, and what they leave out |
| topk.py; power_sgd.py, low_rank.py | codecs of the largest numbers, and of matrices as products of thin ones |
| bucket.py, reducer.py, bucket_errors.py | slices of a FlatBuffer, all-reduced as backward fills them; what that leaves out |
| ddp.py, fsdp.py | the same for torch's own DistributedDataParallel and FSDP2, by one line |
| agreement.py, failure.py | ranks fail together, and errors say which rank, which collective, which bucket |

The result of every collective has the same bits on all ranks. Sums have a fixed order: by rank for two_shot and shared_memory,
and for the ring one that depends on an element's position in its buffer alone, so bucket sizes don't change a result.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyops.comm.collectives import all_gather, all_reduce, reduce_scatter
    from pyops.comm.communicator import Communicator, release
    from pyops.comm.compressed import compressed_all_gather, compressed_all_reduce, compressed_reduce_scatter
    from pyops.comm.ddp import ddp_hook
    from pyops.comm.error_feedback import ErrorFeedback
    from pyops.comm.failure import CommunicationError, DisagreementError
    from pyops.comm.fsdp import fsdp_reduce_scatter
    from pyops.comm.reducer import Reducer

__all__ = [
    "CommunicationError",
    "Communicator",
    "DisagreementError",
    "ErrorFeedback",
    "Reducer",
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
    "CommunicationError": "failure", "Communicator": "communicator", "DisagreementError": "failure", "Reducer": "reducer",
    "ErrorFeedback": "error_feedback", "compressed_all_gather": "compressed", "compressed_all_reduce": "compressed",
    "compressed_reduce_scatter": "compressed", "ddp_hook": "ddp", "fsdp_reduce_scatter": "fsdp",
    "all_gather": "collectives", "all_reduce": "collectives", "reduce_scatter": "collectives", "release": "communicator",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported on first use: what only agrees about an error does not load the algorithms.
    if name in _HOMES:
        return getattr(importlib.import_module(f"pyops.comm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pyops.comm' has no attribute {name!r}; it has {sorted(__all__)}")
