"""Errors that all ranks raise alike are printed once: rank 0 prints, and the others wait until it
has.

torchrun ends all ranks as soon as one of them has ended. A rank that left at once would take the
message of rank 0 with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta

__all__ = ["is_first_rank", "print_error"]

LEAD = 1.0  # seconds that rank 0 has to print under a launcher without a store
LIMIT = timedelta(seconds=10)  # that the other ranks wait for rank 0, which may not have failed


def is_first_rank() -> bool:
    """Whether this process is rank 0, as the variables of torchrun say; so is a process without
    them."""
    return os.environ.get("RANK", "0") == "0"


def print_error(error: object) -> None:
    """Print an error that all ranks raise; a rank other than 0 prints its own only where rank 0
    printed nothing."""
    first = is_first_rank()
    if first:
        print(f"pyops: {error}", file=sys.stderr, flush=True)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if not first:  # mpirun and srun may end rank 0 as soon as this one has ended
            time.sleep(LEAD)
    elif not _printed(first) and not first:
        print(f"pyops: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)


def _printed(first: bool) -> bool:
    """Rank 0 says in torchrun's store that it has printed; other ranks wait for that, and return
    whether it came."""
    import torch.distributed as dist

    key = (
        f"pyops: printed in run {os.environ.get('TORCHELASTIC_RUN_ID')}, start "
        f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    )
    with contextlib.suppress(dist.DistError, ValueError, KeyError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=LIMIT, wait_for_workers=False)
        if first:
            store.set(key, "")
        else:
            store.wait([key], LIMIT)
        return True
    return False
