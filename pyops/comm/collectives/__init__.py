"""Collectives with a fixed order of summation.

| file | what it does |
|---|---|
| functional.py | all_reduce, reduce_scatter, all_gather: what a user calls |
| ring.py, two_shot.py, shared_memory.py | the algorithms, over a small transport |
| transport.py | sends and receives: of a process group, or among threads as virtual ranks |
| arithmetic.py | sums of any dtype: fp32 inside for 16-bit, one rounding |
| communicator.py, probe.py, work.py | what is kept for a group; measured costs for "auto";
asynchronous calls |
"""
