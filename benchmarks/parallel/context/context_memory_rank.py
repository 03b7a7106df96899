"""A rank of the bench of the longest row: a step of a GPT within a limit of memory.

    python -m benchmarks.parallel.context.context_memory_rank OPTIONS

OPTIONS is JSON: '{"length": 4096, "limit_bytes": 2147483648, ...}'.

Rank, size and address are in the environment, as under torchrun. Prints the seconds of the step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyops.comm import all_reduce
from pyops.context_parallel import ContextRanks
from pyops.models import GPT, GPTConfig

__all__ = ["MODEL", "step"]

MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "num_layers": 24,
    "dim": 128,
    "num_heads": 1,
    "head_dim": 16,
    "positions": "rotary",
}


def step(*, length: int, method: str) -> float:
    """Loss and gradients of a row of so many tokens, which all ranks share: seconds."""
    context = ContextRanks.of(method=method) if dist.get_world_size() > 1 else None
    model = GPT(GPTConfig(sequence_length=length, **MODEL), context=context)
    tokens = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    loss = model.loss(tokens, tokens.roll(-1, 1))
    loss.backward()
    if context is not None:
        for p in model.parameters():
            assert p.grad is not None
            all_reduce(p.grad)
    if not torch.isfinite(loss):
        raise AssertionError(f"the loss is {loss}")
    return time.perf_counter() - start


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    limit = options["limit_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(step(length=options["length"], method=options["method"]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
