"""Optimizers that communicate by themselves, a bit per parameter: OneBitAdam, OneBitLAMB, ZeroOneAdam.

    optimizer = pyops.optim.OneBitAdam(model.parameters(), lr=3e-4, warmup_steps=400)
    loss.backward()                 # of this rank's part of the batch; nobody reduces the gradients
    optimizer.step()                # warm-up: exact mean of gradients, AdamW; afterwards: 1 bit per element of momentum

| file | what it does |
|---|---|
| base.py | what all share: ranks agree, gradients and their norm over ranks, skipped steps |
| flat_states.py | one flat fp32 tensor under states of all parameters, and the coordinates that never move |
| schedule.py | when the first phase ends: a number of steps, or the variance-stability rule |
| saving.py | state_dict: torch's, and the communication's own part |
| shards.py | OneBitAdam's phases, for a ZeroOptimizer that shares its states out |
| two_phases.py | exact steps, the switch, compressed momenta: of OneBitAdam and OneBitLAMB |
| frozen.py | the step with a variance that no longer changes |
| exchange.py | one compressed all-reduce with its errors |
| adam.py, lamb.py, zero_one.py | the optimizers |
| layers.py | of 1-bit LAMB: the compressed step, layer by layer |
| rounds.py, variance.py, local_steps.py | of 0/1 Adam: when what is sent, its variance, and steps without a message |

The parameters, and what is communicated, have the same bits on all ranks.
"""

from pyops.onebit.adam import OneBitAdam
from pyops.onebit.lamb import OneBitLAMB
from pyops.onebit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLAMB", "ZeroOneAdam"]
