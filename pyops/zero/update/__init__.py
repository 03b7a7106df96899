"""The step: norms and flags over all ranks, then each rank updates the pieces that it owns.

| file | what it does |
|---|---|
| owned.py | this rank's pieces, their fp32 masters, and the optimizer that steps them |
| told.py, squares.py | the one all-reduce before a step: norms, overflow, agreement |
| stages.py, tensor_parallel.py | the other axes of the mesh: pipeline stages, tensor-parallel ranks
|
| precision.py | the dtype of the model, and the loss scale |
| delayed.py | updates on a thread, one step late |
| one_bit.py | OneBitAdam at stage 1 |
"""
