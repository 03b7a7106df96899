"""Layers that the ranks of a group share out (Megatron): by heads, inner width and vocabulary, and the tokens between them.

    layer = pyops.tensor_parallel.ParallelMLP(512, 2048, group=tp_group, sequence_parallel=True)
    loss(layer(x)).backward()
    pyops.tensor_parallel.finish_gradients(layer, group=tp_group)     # gradients of which each rank has a part

| file | what it does |
|---|---|
| regions.py, ranks.py | autograd edges between what ranks hold together and apart; the group they are of |
| linear.py, products.py | column- and row-parallel linear layers; their products, with collectives beside them |
| attention.py, scores.py | attention by heads; scores, rotary, bias by distance |
| mlp.py, embedding.py, norm.py | MLP, plain and gated; embedding by vocabulary; norms with the residual added |
| dropout.py | dropout by counters |
| cross_entropy.py, vocabulary.py | the loss of logits cut by vocabulary; a rank's part of it |
| linear_cross_entropy.py | the last layer and the loss in one, without the logits |
| initialise.py | parameters drawn by their place in the whole |
| gradients.py | parts summed over ranks, norm, clipping |
| parallelize.py, plans.py, architectures | an existing transformer, its layers swapped by a plan; the plans |
| blueprint.py, perform.py, restore.py | what is settled first; what is done; the model as it was |
| trial.py, virtual.py, example.py | the check of a plan, on ranks that are threads, on made-up inputs |
| swap.py, packed.py, heads.py, edges.py, multihead.py | one layer; q, k, v in one; heads; hooks; torch's attention |
| whole.py | the model's own state_dict again |

A layer's parameters are plain tensors of this rank's size; its `placements` ({name: pyops.flat.Placement}) say where they stand
in the whole. The same seed gives the same model, loss and dropout on any number of ranks. A group of None is one rank alone:
nothing is communicated.
"""

from __future__ import annotations

from pyops.deferred import accumulate_weight_gradient
from pyops.tensor_parallel.attention import ParallelAttention
from pyops.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pyops.tensor_parallel.dropout import Dropout, set_dropout
from pyops.tensor_parallel.embedding import VocabParallelEmbedding
from pyops.tensor_parallel.gradients import clip_grad_norm_, finish_gradients, grad_norm
from pyops.tensor_parallel.initialise import initialise_, initialise_model_
from pyops.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pyops.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from pyops.tensor_parallel.mlp import ParallelMLP
from pyops.tensor_parallel.norm import LayerNorm, RMSNorm
from pyops.tensor_parallel.parallelize import Report, parallelize
from pyops.tensor_parallel.past import Past
from pyops.tensor_parallel.ranks import Ranks
from pyops.tensor_parallel.scores import RelativeBias, rotary_tables
from pyops.tensor_parallel.whole import whole_state_dict

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
