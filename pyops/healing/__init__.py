"""Data parallelism that loses replicas and goes on: no restart, and replacements that join.

    replica = HealingDataParallel(model, optimizer, store)
    while replica.steps < 1000:
        loss = replica.step(lambda module, part: loss_sum_and_rows(module, part))

| file | what it does |
|---|---|
| quorum.py | Quorum: who is alive, agreed on in a store; a process group of these |
| peer_state.py | a state from the replica that is furthest to those behind it, in buckets |
| repeated_step.py | the step that is repeated where a replica is lost |
| peer_copies.py | each rank's portion of a state, kept by it and by a neighbor |
| zero.py | HealingZero: states of the optimizer spread over the replicas |
| replica.py | HealingDataParallel: whole parameters and states on each replica |
"""

from pyops.healing.quorum import Quorum, QuorumConfig
from pyops.healing.repeated_step import Part
from pyops.healing.replica import HealingDataParallel
from pyops.healing.state_lost import StateLostError
from pyops.healing.zero import HealingZero

__all__ = [
    "HealingDataParallel",
    "HealingZero",
    "Part",
    "Quorum",
    "QuorumConfig",
    "StateLostError",
]
