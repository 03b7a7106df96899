"""Hooks of forward and backward: parameters are all-gathered, gradients reduce-scattered.

| file | what it does |
|---|---|
| sharded_gradients.py, reduce_scatter_bucket.py | gradients reduce-scattered during backward |
| reduced_gradient.py | the value of `.grad` between backward and step |
| published_gradients.py | puts that value into `.grad`, and finds what a program did to it |
| sharded_unit.py, unit_trace.py | stage 3: a unit while the program runs; the order of units |
| unshard_hooks.py | stage 3: when the parameters of a unit are gathered and freed |
| overlapped_gather.py | stages 1 and 2: parameters are gathered during the next forward |
| parameter_guard.py | stage 3: an operation on a sharded parameter gathers it, or raises |
| parameter_ownership.py | whether parameters still lie where ZeroOptimizer put them |
"""
