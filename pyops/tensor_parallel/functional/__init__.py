"""Autograd operators over a tensor-parallel group, without modules.

| file | what it does |
|---|---|
| ranks.py | the group, and the few collectives that layers call |
| regions.py | autograd's copy, reduce, scatter, gather between whole and sharded tensors |
| products.py, symmetric.py | matrix products with their collective, overlapped or fused |
| losses | losses of logits sharded by vocabulary |
| scores.py | attention between its projections: rotary positions, bias, softmax |
| dropout.py, initialize.py | random numbers by position in the whole tensor |
| gradients.py | gradients summed over ranks, their norm, clipping |
| keywords.py | arguments that are refused |
"""
