"""Collectives with a fixed order of summation.

| file | what it does |
|---|---|
| functional | all_reduce, reduce_scatter, all_gather: what a user calls |
| ring.py, two_shot.py, shared_memory.py | the algorithms, over a small transport |
| native.py, symmetric | the backend's own; sums in memory that the GPUs of one node share |
| transport.py | sends and receives: of a process group, or among threads as virtual ranks |
| arithmetic.py | sums of any dtype: fp32 inside for 16-bit, one rounding |
| communicator, probe.py, work.py | what is kept for a group; measured costs for "auto";
asynchronous calls |
"""
