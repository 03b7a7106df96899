"""Layers that the ranks of a group share (Megatron): they cut heads, inner width and vocabulary,
and the tokens between the layers.

    layer = pyops.tensor_parallel.ParallelMLP(512, 2048, group=tp_group, sequence_parallel=True)
    loss(layer(x)).backward()
    pyops.tensor_parallel.sync_partial_grads(layer, group=tp_group)   # sums partial gradients

functional: autograd operators over the group: regions, products, losses, dropout, initialization,
gradient norms. layers: linear layers, attention, MLP, embedding and norms as modules. convert:
parallelize: an existing transformer, its layers replaced by a plan that is checked first.

A layer's parameters are plain tensors of this rank's size; its `placements` ({name:
pyops.flat.Placement}) say where they stand in the whole. The same seed gives the same model, loss
and dropout on any number of ranks.

`group` is a process group, or a pyops.mesh.Mesh for its tp group. None is the default process
group, or one rank where torch.distributed is not initialized; pyops.mesh.ALONE is this rank alone,
and then nothing is communicated.
"""

from __future__ import annotations

from typing import Any

from pyops.deferred import accumulate_weight_gradient
from pyops.renamed import missing_attribute
from pyops.tensor_parallel.convert.parallelize import Report, parallelize
from pyops.tensor_parallel.convert.whole import whole_state_dict
from pyops.tensor_parallel.functional.dropout import Dropout, set_dropout
from pyops.tensor_parallel.functional.gradients import (
    clip_grad_norm_,
    grad_norm,
    sync_partial_grads,
)
from pyops.tensor_parallel.functional.initialize import initialize_, initialize_model_
from pyops.tensor_parallel.functional.losses.cross_entropy import vocab_parallel_cross_entropy
from pyops.tensor_parallel.functional.losses.linear_cross_entropy import (
    LinearCrossEntropyConfig,
    linear_cross_entropy,
)
from pyops.tensor_parallel.functional.losses.linear_kl_divergence import (
    DivergenceConfig,
    linear_kl_divergence,
)
from pyops.tensor_parallel.functional.losses.linear_logits import LinearLogits
from pyops.tensor_parallel.functional.losses.vocabulary_part import CrossEntropyConfig
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike
from pyops.tensor_parallel.functional.scores import rotary_tables
from pyops.tensor_parallel.layers.attention import ParallelAttention
from pyops.tensor_parallel.layers.embedding import VocabParallelEmbedding
from pyops.tensor_parallel.layers.kv_cache import KVCache
from pyops.tensor_parallel.layers.layer_config import (
    AttentionConfig,
    ColumnConfig,
    EmbeddingConfig,
    MLPConfig,
    RelativeBiasConfig,
    RowConfig,
)
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyops.tensor_parallel.layers.low_rank import LowRank
from pyops.tensor_parallel.layers.mlp import ParallelMLP
from pyops.tensor_parallel.layers.norm import LayerNorm, RMSNorm
from pyops.tensor_parallel.layers.relative_bias import RelativeBias
from pyops.tensor_parallel.layers.row_cache import MemoryRows, RowCache, RowSpan

__all__ = [
    "AttentionConfig",
    "ColumnConfig",
    "ColumnParallelLinear",
    "CrossEntropyConfig",
    "DivergenceConfig",
    "Dropout",
    "EmbeddingConfig",
    "KVCache",
    "LayerNorm",
    "LinearCrossEntropyConfig",
    "LinearLogits",
    "LowRank",
    "MLPConfig",
    "MemoryRows",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "Ranks",
    "RanksLike",
    "RelativeBias",
    "RelativeBiasConfig",
    "Report",
    "RowCache",
    "RowConfig",
    "RowParallelLinear",
    "RowSpan",
    "VocabParallelEmbedding",
    "accumulate_weight_gradient",
    "clip_grad_norm_",
    "grad_norm",
    "initialize_",
    "initialize_model_",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "parallelize",
    "rotary_tables",
    "set_dropout",
    "sync_partial_grads",
    "vocab_parallel_cross_entropy",
    "whole_state_dict",
]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
