"""GPT-2 (GPT2LMHeadModel): learned positions, LayerNorm, gelu_new, and matrices that are stored as
[in, out]."""

from __future__ import annotations

from typing import Any

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.config_fields import ConfigFields
from pyops.hub.folder_files import HubError
from pyops.hub.weight_packing import AttentionShape, Grouped, Same, Transposed
from pyops.models import GPT, GPTConfig

__all__ = ["GPT2"]

NAMES = {
    "embedding.token.weight": Same("transformer.wte.weight"),
    "embedding.position.weight": Same("transformer.wpe.weight"),
    "blocks.{i}.norm1.weight": Same("transformer.h.{i}.ln_1.weight"),
    "blocks.{i}.norm1.bias": Same("transformer.h.{i}.ln_1.bias"),
    "blocks.{i}.attention.qkv.weight": Grouped(
        "transformer.h.{i}.attn.c_attn.weight", joined=True, transposed=True
    ),
    "blocks.{i}.attention.qkv.bias": Grouped("transformer.h.{i}.attn.c_attn.bias", joined=True),
    "blocks.{i}.attention.output.weight": Transposed("transformer.h.{i}.attn.c_proj.weight"),
    "blocks.{i}.attention.output.bias": Same("transformer.h.{i}.attn.c_proj.bias"),
    "blocks.{i}.norm2.weight": Same("transformer.h.{i}.ln_2.weight"),
    "blocks.{i}.norm2.bias": Same("transformer.h.{i}.ln_2.bias"),
    "blocks.{i}.mlp.up.weight": Transposed("transformer.h.{i}.mlp.c_fc.weight"),
    "blocks.{i}.mlp.up.bias": Same("transformer.h.{i}.mlp.c_fc.bias"),
    "blocks.{i}.mlp.down.weight": Transposed("transformer.h.{i}.mlp.c_proj.weight"),
    "blocks.{i}.mlp.down.bias": Same("transformer.h.{i}.mlp.c_proj.bias"),
    "head.norm.weight": Same("transformer.ln_f.weight"),
    "head.norm.bias": Same("transformer.ln_f.bias"),
    "head.output.weight": Same("lm_head.weight"),
}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def read(fields: ConfigFields, names: frozenset[str]) -> GPTConfig:
    fields.fixed(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    if fields.probability("embd_pdrop", 0.1) != fields.probability("resid_pdrop", 0.1):
        raise HubError(
            f"config.json has embd_pdrop = {fields.raw('embd_pdrop', 0.1)} and resid_pdrop "
            f"= {fields.raw('resid_pdrop', 0.1)}, "
            "pyops has one number for both; make them equal there"
        )
    width = fields.integer("n_embd")
    return GPTConfig(
        vocab_size=fields.integer("vocab_size"),
        sequence_length=fields.integer("n_positions"),
        num_layers=fields.integer("n_layer", of="tensors"),
        num_heads=fields.integer("n_head"),
        dim=width,
        hidden=fields.integer("n_inner", 4 * width, optional=True),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied_head=fields.flag("tie_word_embeddings", True),
        dropout=fields.probability("resid_pdrop", 0.1),
        attention_dropout=fields.probability("attn_pdrop", 0.1),
    )


def write(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.sequence_length,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.dim,
        "n_inner": config.mlp_width,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


GPT2 = Architecture(
    kind="gpt2",
    classes=("GPT2LMHeadModel",),
    model=GPT,
    config=GPTConfig,
    names=lambda config: NAMES,
    read=read,
    write=write,
    heads=lambda config: AttentionShape(config.num_heads, config.num_heads, config.head_width),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)$",),  # the causal mask
)
