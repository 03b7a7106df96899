"""Weight gradients: at once, in fp32 beside the weight, or put off until a pipeline has nothing
better to do.

| file | what it does |
|---|---|
| queue.py | the queue of what was put off, and the gradients of linear layers |
"""

from pyops.deferred.queue import (
    Deferred,
    Pieces,
    accumulate_weight_gradient,
    is_marked,
    linear,
    linears,
    remove,
    weight_gradient,
)

__all__ = [
    "Deferred",
    "Pieces",
    "accumulate_weight_gradient",
    "is_marked",
    "linear",
    "linears",
    "remove",
    "weight_gradient",
]
