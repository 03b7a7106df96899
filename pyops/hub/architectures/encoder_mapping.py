"""What BERT, RoFormer and ViT of transformers have in common: the names within a layer, and the
fields of config.json for its sizes."""

from __future__ import annotations

from typing import Any

from pyops.hub.config_fields import ConfigFields
from pyops.hub.weight_packing import AttentionShape, Grouped, Packing, Same
from pyops.models import BERTConfig, ViTConfig

__all__ = ["attention_shape", "layer_names", "read_sizes", "write_sizes"]

# hidden_act of config.json -> activation of the configuration
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def layer_names(layer: str, *, attention: str, norm1: str, norm2: str) -> dict[str, Packing]:
    """Parameters of a block to their packings.

    Args:
        layer: what the names of a layer's tensors begin with, "{i}" for its number.
        attention: what those of queries, keys and values go on with.
        norm1: what those of the norm of the attention go on with.
        norm2: what those of the norm of the MLP go on with.
    """
    names: dict[str, Packing] = {}
    for kind in ("weight", "bias"):
        query, key, value = (
            f"{layer}{attention}{part}.{kind}" for part in ("query", "key", "value")
        )
        names |= {
            f"blocks.{{i}}.attention.qkv.{kind}": Grouped(query, key, value),
            f"blocks.{{i}}.attention.output.{kind}": Same(f"{layer}attention.output.dense.{kind}"),
            f"blocks.{{i}}.norm1.{kind}": Same(f"{layer}{norm1}.{kind}"),
            f"blocks.{{i}}.mlp.up.{kind}": Same(f"{layer}intermediate.dense.{kind}"),
            f"blocks.{{i}}.mlp.down.{kind}": Same(f"{layer}output.dense.{kind}"),
            f"blocks.{{i}}.norm2.{kind}": Same(f"{layer}{norm2}.{kind}"),
        }
    return names


def read_sizes(fields: ConfigFields, *, dropout: float) -> dict[str, Any]:
    """Fields of the configuration, of those of config.json.

    Args:
        dropout: Where that says none.
    """
    return {
        "num_layers": fields.integer("num_hidden_layers", of="tensors"),
        "num_heads": fields.integer("num_attention_heads"),
        "dim": fields.integer("hidden_size"),
        "hidden": fields.integer("intermediate_size"),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        "norm_eps": fields.number("layer_norm_eps", 1e-12),
        "dropout": fields.probability("hidden_dropout_prob", dropout),
        "attention_dropout": fields.probability("attention_probs_dropout_prob", dropout),
    }


def write_sizes(config: BERTConfig | ViTConfig) -> dict[str, Any]:
    """The way back of `read_sizes`."""
    return {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_width,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


def attention_shape(config: BERTConfig | ViTConfig) -> AttentionShape:
    """The heads of the attention, each with keys and values of its own."""
    return AttentionShape(config.num_heads, config.num_heads, config.dim // config.num_heads)
