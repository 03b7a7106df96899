"""The collectives that a user calls: any dtype, any size, any strides, one result on all ranks, bit
for bit.

| file | what it does |
|---|---|
| sums.py, gathers.py | all_reduce and reduce_scatter; all_gather |
| operands.py | what no collective takes, and the flat view of a tensor |
| call_options.py | what callers within pyops tell a collective beside its public arguments |
"""

from pyops.comm.collectives.functional.gathers import all_gather, gather_bytes
from pyops.comm.collectives.functional.sums import all_reduce, reduce_scatter

__all__ = ["all_gather", "all_reduce", "gather_bytes", "reduce_scatter"]
