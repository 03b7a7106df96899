"""Llama (LlamaForCausalLM): rotary positions, RMSNorm, gated silu, grouped queries."""

from __future__ import annotations

from typing import Any

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.config_fields import ConfigFields, shown
from pyops.hub.folder_files import HubError
from pyops.hub.weight_packing import AttentionShape, Grouped, Same, Stacked
from pyops.models import GPT, GPTConfig

__all__ = ["LLAMA"]

ATTENTION, MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
NAMES = {
    "embedding.token.weight": Same("model.embed_tokens.weight"),
    "blocks.{i}.norm1.weight": Same("model.layers.{i}.input_layernorm.weight"),
    "blocks.{i}.attention.qkv.weight": Grouped(*(f"{ATTENTION}{m}_proj.weight" for m in "qkv")),
    "blocks.{i}.attention.qkv.bias": Grouped(*(f"{ATTENTION}{m}_proj.bias" for m in "qkv")),
    "blocks.{i}.attention.q.weight": Same(f"{ATTENTION}q_proj.weight"),
    "blocks.{i}.attention.q.bias": Same(f"{ATTENTION}q_proj.bias"),
    "blocks.{i}.attention.kv.weight": Grouped(*(f"{ATTENTION}{m}_proj.weight" for m in "kv")),
    "blocks.{i}.attention.kv.bias": Grouped(*(f"{ATTENTION}{m}_proj.bias" for m in "kv")),
    "blocks.{i}.attention.output.weight": Same(f"{ATTENTION}o_proj.weight"),
    "blocks.{i}.attention.output.bias": Same(f"{ATTENTION}o_proj.bias"),
    "blocks.{i}.norm2.weight": Same("model.layers.{i}.post_attention_layernorm.weight"),
    "blocks.{i}.mlp.up.weight": Stacked(f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight"),
    "blocks.{i}.mlp.up.bias": Stacked(f"{MLP}gate_proj.bias", f"{MLP}up_proj.bias"),
    "blocks.{i}.mlp.down.weight": Same(f"{MLP}down_proj.weight"),
    "blocks.{i}.mlp.down.bias": Same(f"{MLP}down_proj.bias"),
    "head.norm.weight": Same("model.norm.weight"),
    "head.output.weight": Same("lm_head.weight"),
}


def read(fields: ConfigFields, names: frozenset[str]) -> GPTConfig:
    fields.fixed(hidden_act="silu")
    bias = fields.flag("attention_bias", False)
    if fields.flag("mlp_bias", False) != bias:
        raise HubError(
            f"config.json has attention_bias = {bias} and mlp_bias = {not bias}; pyops "
            "has both or none"
        )
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return GPTConfig(
        vocab_size=fields.integer("vocab_size"),
        sequence_length=fields.positions("max_position_embeddings"),
        num_layers=fields.integer("num_hidden_layers", of="tensors"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads, optional=True),
        head_dim=fields.integer("head_dim", width // heads, optional=True),
        dim=width,
        hidden=fields.integer("intermediate_size"),
        norm="rmsnorm",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation="swiglu",
        positions="rotary",
        tied_head=fields.flag("tie_word_embeddings", False),
        bias=bias,
        attention_dropout=fields.probability("attention_dropout", 0.0),
        **_rotary(fields),
    )


def _rotary(fields: ConfigFields) -> dict[str, Any]:
    """Angles of positions. Since transformers 5 they stand in rope_parameters, before at the top
    and in rope_scaling, which transformers still takes first where a file has both."""
    where = "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"
    rope = fields.within(fields.section(where) or {})
    kind = rope.raw("rope_type", rope.raw("type", "default"))
    if kind not in ("default", "llama3"):
        raise HubError(
            f"config.json has {where} of rope_type {str(kind)[:80]!r}; pyops has "
            "'default' and 'llama3'"
        )
    share = (rope if "partial_rotary_factor" in rope else fields).raw("partial_rotary_factor")
    if kind == "llama3" and share not in (
        None,
        1.0,
    ):  # the default angles of a Llama in transformers leave it unread
        raise HubError(
            f"config.json has partial_rotary_factor = {shown(share)}; pyops turns whole "
            "heads, which is 1.0"
        )
    found: dict[str, Any] = {
        "rotary_theta": (rope if "rope_theta" in rope else fields).number("rope_theta", 1e4)
    }
    if (
        kind == "llama3" and rope.number("factor") != 1.0
    ):  # 1 is no stretching, whatever else stands there
        found |= {
            "rotary_stretch": rope.number("factor"),
            "rotary_low": rope.number("low_freq_factor"),
            "rotary_high": rope.number("high_freq_factor"),
            "rotary_length": rope.positions("original_max_position_embeddings"),
        }
    return found


def _rope(config: GPTConfig) -> dict[str, Any]:
    if config.rotary_stretch == 1.0:
        return {"rope_type": "default", "rope_theta": config.rotary_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rotary_theta,
        "factor": config.rotary_stretch,
        "low_freq_factor": config.rotary_low,
        "high_freq_factor": config.rotary_high,
        "original_max_position_embeddings": config.rotary_length,
    }


def write(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_width,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_parameters": _rope(config),
        "rope_theta": config.rotary_theta,
        "rope_scaling": _rope(config) if config.rotary_stretch != 1.0 else None,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.attention_dropout,
    }


LLAMA = Architecture(
    kind="llama",
    classes=("LlamaForCausalLM",),
    model=GPT,
    config=GPTConfig,
    names=lambda config: NAMES,
    read=read,
    write=write,
    heads=lambda config: AttentionShape(config.num_heads, config.kv_heads, config.head_width),
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=(r"rotary_emb\.inv_freq$",),
)
