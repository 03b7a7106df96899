"""The step: norms and flags over all ranks, then each rank updates its shards.

| file | what it does |
|---|---|
| sharded_optimizer_state.py | this rank's shards, their fp32 masters, and the optimizer of them |
| step_stats.py | the statistics that are all-reduced before a step: norm, overflow, agreement |
| gradient_squares.py | the squared norm of each parameter's gradient |
| pipeline_axis.py, tensor_parallel_axis.py | the other axes of the mesh |
| precision_plan.py | the dtype of the model, and the loss scale |
| delayed_update.py | updates on a thread, one step late |
| one_bit.py | OneBitAdam at stage 1 |
"""
