"""The parts of which the one-bit optimizers are made.

| file | what it does |
|---|---|
| state_slots.py | one flat fp32 tensor under the states of all parameters |
| momentum_exchange.py | one compressed all-reduce with its error buffers |
| frozen_variance_step.py | the step with a frozen variance |
| deepspeed_step.py | DeepSpeed's step without bias correction |
| layer_ratios.py | 1-bit LAMB: the compressed step, layer by layer |
| round_schedule.py, variance.py, local_steps.py | 0/1 Adam: its schedule of communication, its
variance, and its local steps |
"""
