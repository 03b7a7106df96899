"""The collectives that a user calls: any dtype, any size, any strides, one result on all ranks, bit
for bit.

| file | what it does |
|---|---|
| sums.py | all_reduce, reduce_scatter, all_gather |
| call_options.py | what callers within pyops tell a collective beside its public arguments |
"""

from pyops.comm.collectives.functional.sums import (
    all_gather,
    all_reduce,
    gather_bytes,
    reduce_scatter,
)

__all__ = ["all_gather", "all_reduce", "gather_bytes", "reduce_scatter"]
