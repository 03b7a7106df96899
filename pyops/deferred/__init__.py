"""Weight gradients: at once, in fp32 beside the weight, or put off until a pipeline has nothing
better to do.

    I  with queue.collecting():           dy --> dx = dy W --> ...          dy, x --> queue
           torch.autograd.backward(loss)
    W  queue.take().accumulate()          dW = dy^T x, db = sum of dy --> .grad or main_grad, hooks

A layer asks `weight_gradient` for the gradients of its weight and bias; whether a parameter carries
a queue (`deferred`) or an fp32 sum (`main_grad`) is no business of the layer's. Linear layers do:
those of pyops.tensor_parallel, and torch.nn.Linear after `linears(module)`. A norm's weight
gradient comes with that of its input for nothing, and a convolution's, an embedding's or any other
module's is autograd's: they are not put off.

I then W has the bits of one backward pass. (The split: Qi et al., "Zero Bubble Pipeline
Parallelism", 2024, section 2.)

| file | what it does |
|---|---|
| gradients.py | the gradient of a weight or bias: at once, put off, or added to an fp32 sum |
| queue.py | the queue of what was put off |
| layers.py | linear layers whose gradients may be put off |
"""

from pyops.deferred.gradients import accumulate_weight_gradient, is_marked, weight_gradient
from pyops.deferred.layers import linear, linears, remove
from pyops.deferred.queue import Deferred, Pieces

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
