"""Optimizers that communicate by themselves, a bit per parameter: OneBitAdam, OneBitLAMB,
ZeroOneAdam.

    optimizer = pyops.optim.OneBitAdam(model.parameters(), lr=3e-4, warmup_steps=400)
    loss.backward()                 # of this rank's part of the batch; nobody reduces the gradients
    optimizer.step()                # warm-up: exact mean of gradients, AdamW; afterwards: 1 bit per element of momentum

| folder or file | what it does |
|---|---|
| adam.py, lamb.py, zero_one.py | the optimizers |
| base.py | what all share: ranks agree, gradients and their norm over ranks, skipped steps |
| two_phases.py, schedule.py | exact steps, the switch, compressed momenta; when the first phase
ends |
| shards.py | OneBitAdam's phases, for a ZeroOptimizer that shards its states |
| saving.py | state_dict: torch's, and the communication's own part |
| steps | the parts of which they are made: flat states, one compressed all-reduce, half-steps |

The parameters, and what is communicated, have the same bits on all ranks.
"""

from pyops.onebit.adam import OneBitAdam
from pyops.onebit.lamb import OneBitLAMB
from pyops.onebit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLAMB", "ZeroOneAdam"]
