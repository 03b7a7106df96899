"""The parts of which the one-bit optimizers are made.

| file | what it does |
|---|---|
| flat_states.py | one flat fp32 tensor under the states of all parameters |
| exchange.py | one compressed all-reduce with its error buffers |
| frozen.py, uncorrected.py | the step with a frozen variance; DeepSpeed's step without bias
correction |
| layers.py | 1-bit LAMB: the compressed step, layer by layer |
| rounds.py, variance.py, local_steps.py | 0/1 Adam: its schedule of communication, its variance,
and its local steps |
"""
