"""Options of the tensor-parallel layers, beside their sizes and the ranks that share them.

ParallelAttention(512, 8, AttentionConfig(num_kv_heads=2, causal=True), group=tp_group)
"""

from __future__ import annotations

from dataclasses import dataclass

from pyops.attention import Pattern

__all__ = [
    "AttentionConfig",
    "ColumnConfig",
    "EmbeddingConfig",
    "InitConfig",
    "LinearConfig",
    "MLPConfig",
    "ReduceConfig",
    "RelativeBiasConfig",
    "RowConfig",
]


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How a layer's weights are drawn; biases begin as zero."""

    seed: int | None = 0
    """Weights are drawn from the stream (seed, name + ".weight"), so that any number of ranks
    begins with the same values. None: they stay as they are in memory, for a model that draws or
    loads all its parameters itself."""
    name: str = ""
    """The layer's name in the model, which tells its stream from those of other layers."""
    std: float = 0.02
    """Standard deviation of the weights."""


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(InitConfig):
    """How products are summed over the ranks."""

    skip_bias: bool = False
    """Return (y without the bias, the bias or None), for a caller that adds it in a fused
    operation (Megatron's skip_bias_add)."""
    reduce: str = "fp32"
    """ "fp32": 16-bit products are summed over the ranks in fp32 and rounded once. "native": they
    are summed in 16 bits, and half the bytes are sent."""
    overlap: bool = True
    """Communicate while a product that does not need the result is computed; the bits are the same
    either way."""


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ReduceConfig):
    """Options of both linear layers."""

    unit: int = 1
    """Rows or columns of the weight that stay together on one rank: a head's width, say."""


@dataclass(frozen=True, kw_only=True)
class ColumnConfig(LinearConfig):
    """Options of ColumnParallelLinear."""

    stacked: int = 0
    """Number of matrices [out, in] that lie in one weight [stacked, out / ranks, in], each cut for
    itself: y has their columns one after the other. 0: one matrix [out / ranks, in]."""
    copies: int = 1
    """Number of neighbouring ranks that hold the same columns, each with a part of their
    gradient."""
    gather_output: bool = False
    """y is whole, [..., out], on every rank."""


@dataclass(frozen=True, kw_only=True)
class RowConfig(LinearConfig):
    """Options of RowParallelLinear."""

    scatter_input: bool = False
    """x is whole, [..., in], on every rank, and each takes its columns of it."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig(ReduceConfig):
    """Options of ParallelMLP."""

    activation: str = "gelu"
    """ "gelu" (with erf), "gelu_tanh", "relu" or "silu"."""
    gated: bool = False
    """act(gate x) * (up x), see Shazeer, 2020."""
    bias: bool = True
    """Both linear layers have a bias."""
    dropout: float = 0.0
    """Probability with which elements of the activation are dropped in training; see
    pyops.tensor_parallel.functional.dropout."""
    out_std: float | None = None
    """Standard deviation of down.weight; None: std."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ReduceConfig):
    """Options of ParallelAttention."""

    num_kv_heads: int | None = None
    """Number of heads of keys and values, each shared by as many heads of queries (Ainslie et al.,
    2023); None: num_heads."""
    head_dim: int | None = None
    """Width of a head; None: dim / num_heads."""
    causal: bool = False
    """A token sees itself and the tokens before it."""
    cross: bool = False
    """Keys and values are those of `memory`, the output of an encoder."""
    memory_dim: int | None = None
    """Width of `memory`; None: dim."""
    bias: bool = True
    """Queries, keys and values have a bias."""
    out_bias: bool | None = None
    """The output has a bias; None: as `bias`."""
    scale: float | None = None
    """Factor of the scores; None: head_dim^-1/2."""
    dropout: float = 0.0
    """Probability with which attention weights are dropped in training; see
    pyops.tensor_parallel.functional.dropout."""
    interleaved: bool = False
    """Rotary positions turn the pairs (0, 1), (2, 3), ... of a head, instead of its halves."""
    out_std: float | None = None
    """Standard deviation of output.weight; None: std."""
    pattern: Pattern | None = None
    """Which blocks of tokens see which; None: all see all, or all before them. A rank has the
    layout of its heads as they are numbered in the whole; where causal, a token sees the same keys
    in a sequence of any length."""
    pattern_block: int = 64
    """Tokens of a block's side, a multiple of 16."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(InitConfig):
    """Options of VocabParallelEmbedding."""

    check_tokens: bool = True
    """A token outside the vocabulary raises ValueError, on every rank, with its value and its
    place. On CUDA, where nothing waits for the device, an assertion fails there instead. Without
    the check such a token gives a row of zeros where the table is cut. Compiled code never
    checks."""
    padding_idx: int | None = None
    """A token whose row gets no gradient from this layer."""


@dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(InitConfig):
    """Options of RelativeBias."""

    num_buckets: int = 32
    """Number of learned values for each head."""
    max_distance: int = 128
    """Distances from here on share the last bucket."""
    bidirectional: bool = True
    """For an encoder: half of the buckets are for keys behind the query."""
