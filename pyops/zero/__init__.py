"""ZeRO: states, gradients and parameters spread over the ranks of data-parallel training.

    optimizer = pyops.zero.ZeroOptimizer(model, pyops.optim.AdamW, stage=2, lr=3e-4, max_grad_norm=1.0)
    for batch in my_part_of_the_batches:
        loss(model(batch)).backward()            # gradients are reduce-scattered while it runs
        optimizer.step()                         # each rank steps what it owns; then parameters are gathered

| file | what it does |
|---|---|
| optimizer.py, checks.py | ZeroOptimizer: what a user calls, and what it refuses |
| partition.py | who owns what: buckets, chunks, pieces; pure arithmetic |
| parameters.py | parameters in flat buffers |
| gradients.py | buckets of gradients, reduce-scattered during backward |
| reduced.py, shown.py | what `.grad` is between backward and step, and what a program may do to it |
| precision.py | precision=: the cast of the model, and its loss scale |
| owned.py | this rank's pieces and the ordinary optimizer over them; masters |
| delayed.py | updates on a thread, one step late |
| one_bit.py | OneBitAdam at stage 1: a bit per parameter each way after the warm-up |
| told.py | what the ranks tell each other before a step |
| saving.py | state by parameter name, as ranges of flattened tensors |
| units.py, sharded.py, gathering.py | stage 3: which parameters are gathered together, their chunks, and when |
| spread.py | stage 3: what touches parameters that are elsewhere gets them, or an error with the fix |
| wire.py | few bits on the wire, and gathers within a small group: ZeRO++ |
| stored.py | stage 3: shards of parameters in a file |
| arriving.py | stages 1 and 2: parameters gathered while the next forward computes |
| layout.py, materialise.py | every parameter gets its place; models on the meta device |
| memory.py | bytes that a rank keeps |
| agreement.py | what the ranks must have in common |
"""

from __future__ import annotations

from pyops.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
