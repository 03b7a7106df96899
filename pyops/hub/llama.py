"""Llama (LlamaForCausalLM): rotary positions, RMSNorm, gated silu, grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyops.hub.architecture import Architecture, fixed
from pyops.hub.files import HubError
from pyops.hub.packing import Grouped, Heads, Same, Stacked
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


def read(told: Mapping[str, Any], names: frozenset[str]) -> GPTConfig:
    fixed(told, hidden_act="silu")
    bias = told.get("attention_bias", False)
    if told.get("mlp_bias", False) != bias:
        raise HubError(f"config.json has attention_bias = {bias} and mlp_bias = {not bias}; pyops has both or none")
    heads = told["num_attention_heads"]
    return GPTConfig(
        vocab_size=told["vocab_size"], sequence_length=told["max_position_embeddings"],
        num_layers=told["num_hidden_layers"], num_heads=heads, num_kv_heads=told.get("num_key_value_heads") or heads,
        head_dim=told.get("head_dim") or told["hidden_size"] // heads, dim=told["hidden_size"],
        hidden=told["intermediate_size"], norm="rmsnorm", norm_eps=told.get("rms_norm_eps", 1e-6), activation="swiglu",
        positions="rotary", tied_head=told.get("tie_word_embeddings", False), bias=bias,
        attention_dropout=told.get("attention_dropout") or 0.0, **_rotary(told),
    )  # fmt: skip


def _rotary(told: Mapping[str, Any]) -> dict[str, Any]:
    """Angles of positions; since transformers 5 they stand in rope_parameters, before at the top and in rope_scaling."""
    rope = told.get("rope_parameters") or {"rope_theta": told.get("rope_theta", 1e4), **(told.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise HubError(f"config.json has positions of rope_type {kind!r}; pyops has 'default' and 'llama3'")
    found: dict[str, Any] = {"rotary_theta": float(rope["rope_theta"])}
    if kind == "llama3":
        found |= {
            "rotary_stretch": float(rope["factor"]), "rotary_low": float(rope["low_freq_factor"]),
            "rotary_high": float(rope["high_freq_factor"]), "rotary_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
    return found


def _rope(config: GPTConfig) -> dict[str, Any]:
    if config.rotary_stretch == 1.0:
        return {"rope_type": "default", "rope_theta": config.rotary_theta}
    return {
        "rope_type": "llama3", "rope_theta": config.rotary_theta, "factor": config.rotary_stretch,
        "low_freq_factor": config.rotary_low, "high_freq_factor": config.rotary_high,
        "original_max_position_embeddings": config.rotary_length,
    }  # fmt: skip


def write(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "max_position_embeddings": config.sequence_length,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "hidden_size": config.dim,
        "intermediate_size": config.mlp_width, "rms_norm_eps": config.norm_eps, "hidden_act": "silu",
        "rope_parameters": _rope(config), "rope_theta": config.rotary_theta,
        "rope_scaling": _rope(config) if config.rotary_stretch != 1.0 else None,
        "tie_word_embeddings": config.tied_head, "attention_bias": config.bias, "mlp_bias": config.bias,
        "attention_dropout": config.attention_dropout,
    }  # fmt: skip


LLAMA = Architecture(
    kind="llama",
    classes=("LlamaForCausalLM",),
    model=GPT,
    config=GPTConfig,
    names=lambda config: NAMES,
    read=read,
    write=write,
    heads=lambda config: Heads(config.num_heads, config.kv_heads, config.head_width),
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=(r"rotary_emb\.inv_freq$",),
)
