"""PowerSGD: matrices as products of two thin ones that all ranks share.

| file | what it does |
|---|---|
| codec.py | PowerSGD, its memory and its two collectives |
| low_rank.py | families of matrices and the products of thin ones |
"""

from pyops.comm.compression.power_sgd.codec import PowerSGD, PowerSGDMemory, low_rank_mean

__all__ = ["PowerSGD", "PowerSGDMemory", "low_rank_mean"]
