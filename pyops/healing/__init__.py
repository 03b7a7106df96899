"""Data parallelism that loses replicas and goes on: no restart, and replacements that join.

    replica = HealingDataParallel(model, optimizer, store)
    while replica.steps < 1000:
        loss = replica.step(lambda module, part: loss_sum_and_rows(module, part))

| file | what it does |
|---|---|
| quorum.py | Quorum: who is alive, agreed on in a store; a process group of these |
| peer_state.py | a state from the replica that is furthest to those behind it, in buckets |
| replica.py | HealingDataParallel: the step that is repeated where a replica is lost |
"""

from pyops.healing.quorum import Quorum, QuorumConfig
from pyops.healing.replica import HealingDataParallel, Part

__all__ = ["HealingDataParallel", "Part", "Quorum", "QuorumConfig"]
