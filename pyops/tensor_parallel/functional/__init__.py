"""Autograd operators over a tensor-parallel group, without modules.

| file | what it does |
|---|---|
| ranks.py, regions.py | the group; autograd's copy, reduce, scatter, gather between whole and
sharded tensors |
| products.py, symmetric.py | matrix products with their collective, overlapped or fused |
| vocabulary.py, cross_entropy.py, linear_cross_entropy.py | the loss of logits sharded by
vocabulary |
| scores.py | attention between its projections: rotary positions, bias, softmax |
| dropout.py, initialise.py | random numbers by position in the whole tensor |
| gradients.py | gradients summed over ranks, their norm, clipping |
"""
