"""Attention: one differentiable operation with masks, documents, windows, block layouts, biases and
dropout, none of which makes a tensor of queries x keys."""

from pyops.ops.attention.arguments import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.attention.block_layout import BlockLayout
from pyops.ops.attention.contract import attention, attention_with_lse
from pyops.ops.attention.gradients import AttentionGradients, attention_gradients
from pyops.ops.attention.merging import merge
from pyops.ops.attention.reference import attention_backward_reference, attention_forward_reference

__all__ = [
    "AttentionBias",
    "AttentionDropout",
    "AttentionGradients",
    "AttentionMask",
    "BlockLayout",
    "attention",
    "attention_backward_reference",
    "attention_forward_reference",
    "attention_gradients",
    "attention_with_lse",
    "merge",
]
