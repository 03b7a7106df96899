"""PowerSGD: matrices as products of two thin ones that all ranks share.

| file | what it does |
|---|---|
| codec.py, matrix_codec.py | PowerSGD: its collectives; that it has no payload of a piece |
| memory.py | PowerSGDMemory: errors and directions from one step to the next |
| mean.py | the mean of gradients at low rank: the two exchanges of a step |
| low_rank.py | families of matrices and the products of thin ones |
"""

from pyops.comm.compression.power_sgd.codec import PowerSGD
from pyops.comm.compression.power_sgd.mean import low_rank_mean
from pyops.comm.compression.power_sgd.memory import PowerSGDMemory

__all__ = ["PowerSGD", "PowerSGDMemory", "low_rank_mean"]
