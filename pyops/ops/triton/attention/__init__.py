"""Attention for CUDA: forward, and backward in two passes, by tiles of keys (dk, dv) and by tiles
of queries (dq), so that every sum has one order and no atomics are needed; the gradients of biases
in a third, by tiles of keys.

    problem     arguments as the kernels take them; lists of tiles that meet
    tiles       a tile of scores: what is seen, added, dropped; visits
    forward     y and lse
    backward    dq, dk and dv        biases     gradients of a bias and of a table by distance
"""

from pyops.ops.triton.attention.backward import attention_backward
from pyops.ops.triton.attention.forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
