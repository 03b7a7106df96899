"""Optimizers that communicate by themselves, a bit per parameter: OneBitAdam, OneBitLAMB,
ZeroOneAdam.

    config = OneBitConfig(warmup_steps=400)
    optimizer = OneBitAdam(model.parameters(), lr=3e-4, config=config)
    loss.backward()        # of this rank's part of the batch; nobody reduces the gradients
    optimizer.step()       # warm-up: exact mean of gradients, AdamW; then 1 bit per momentum
                           # element

| folder or file | what it does |
|---|---|
| adam.py, lamb.py, zero_one.py | the optimizers |
| config.py | their options, as frozen dataclasses |
| communicating.py | what all share: ranks agree, norm of gradients over ranks, skipped steps |
| two_phases.py | exact steps, the switch, compressed momenta |
| sharded.py | OneBitAdam's phases, for a ZeroOptimizer that shards its states |
| communication_state.py | state_dict: torch's, and the communication's own part |
| steps | the parts of which they are made: flat states, one compressed all-reduce, half-steps |

When the warm-up ends and what the switch does to the states is in pyops/optim/one_bit.py, which
ZeroOptimizer uses too. The parameters, and what is communicated, have the same bits on all ranks.
"""

from pyops.onebit.adam import OneBitAdam
from pyops.onebit.config import OneBitConfig, OneBitLAMBConfig, ZeroOneConfig
from pyops.onebit.lamb import OneBitLAMB
from pyops.onebit.zero_one import ZeroOneAdam

__all__ = [
    "OneBitAdam",
    "OneBitConfig",
    "OneBitLAMB",
    "OneBitLAMBConfig",
    "ZeroOneAdam",
    "ZeroOneConfig",
]
