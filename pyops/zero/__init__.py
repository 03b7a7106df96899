"""ZeRO: states, gradients and parameters spread over the ranks of data-parallel training.

    optimizer = ZeroOptimizer(model, AdamW, ZeroConfig(stage=2, max_grad_norm=1.0), lr=3e-4)
    for batch in my_part_of_the_batches:
        loss(model(batch)).backward()            # gradients are reduce-scattered while it runs
        optimizer.step()                         # each rank steps what it owns; then parameters are
                                                 # gathered

| folder or file | what it does |
|---|---|
| optimizer.py, build.py | ZeroOptimizer: what a user calls; the parameters' way into buffers or
shards |
| checks.py, agreement.py | what is refused; what the ranks must have in common |
| layout | which rank has which part of which parameter, and the memory that holds it |
| hooks | during forward and backward: parameters gathered, gradients reduce-scattered |
| update | the step: norms over all ranks, then each rank updates what it owns |
| state | what a checkpoint gets; the bytes that a rank keeps |
"""

from __future__ import annotations

from pyops.zero.config import ZeroConfig
from pyops.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroConfig", "ZeroOptimizer"]
