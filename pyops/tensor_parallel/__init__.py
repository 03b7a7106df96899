"""Layers that the ranks of a group share out (Megatron): by heads, inner width and vocabulary, and
the tokens between them.

    layer = pyops.tensor_parallel.ParallelMLP(512, 2048, group=tp_group, sequence_parallel=True)
    loss(layer(x)).backward()
    pyops.tensor_parallel.finish_gradients(layer, group=tp_group)     # gradients of which each rank has a part

| folder | what it does |
|---|---|
| functional | autograd operators over the group: regions, products, losses, dropout,
initialization, gradient norms |
| layers | linear layers, attention, MLP, embedding and norms as modules |
| convert | parallelize: an existing transformer, its layers replaced by a plan that is checked
first |

A layer's parameters are plain tensors of this rank's size; its `placements` ({name:
pyops.flat.Placement}) say where they stand in the whole. The same seed gives the same model, loss
and dropout on any number of ranks. A group of None is one rank alone: nothing is communicated.
"""

from __future__ import annotations

from pyops.deferred import accumulate_weight_gradient
from pyops.tensor_parallel.convert.parallelize import Report, parallelize
from pyops.tensor_parallel.convert.whole import whole_state_dict
from pyops.tensor_parallel.functional.cross_entropy import vocab_parallel_cross_entropy
from pyops.tensor_parallel.functional.dropout import Dropout, set_dropout
from pyops.tensor_parallel.functional.gradients import clip_grad_norm_, finish_gradients, grad_norm
from pyops.tensor_parallel.functional.initialise import initialise_, initialise_model_
from pyops.tensor_parallel.functional.linear_cross_entropy import linear_cross_entropy
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.functional.scores import RelativeBias, rotary_tables
from pyops.tensor_parallel.layers.attention import ParallelAttention
from pyops.tensor_parallel.layers.embedding import VocabParallelEmbedding
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyops.tensor_parallel.layers.mlp import ParallelMLP
from pyops.tensor_parallel.layers.norm import LayerNorm, RMSNorm
from pyops.tensor_parallel.layers.past import Past

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "LayerNorm",
    "ParallelAttention",
    "ParallelMLP",
    "Past",
    "RMSNorm",
    "Ranks",
    "RelativeBias",
    "Report",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "accumulate_weight_gradient",
    "clip_grad_norm_",
    "finish_gradients",
    "grad_norm",
    "initialise_",
    "initialise_model_",
    "linear_cross_entropy",
    "parallelize",
    "rotary_tables",
    "set_dropout",
    "vocab_parallel_cross_entropy",
    "whole_state_dict",
]
