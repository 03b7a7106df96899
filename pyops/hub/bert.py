"""BERT (BertForPreTraining, BertForMaskedLM): token types, norms behind the residuals, masked-token head, pooled head.

RoFormer (RoFormerForMaskedLM) is the same with rotary positions in place of learned ones, and without the pooled head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyops.hub.architecture import Architecture, fixed
from pyops.hub.files import HubError
from pyops.hub.packing import Grouped, Heads, Packing, Same
from pyops.models import BERT, BERTConfig

__all__ = ["BERT_MODEL", "ROFORMER"]

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
PRETRAINING, MASKED = "BertForPreTraining", "BertForMaskedLM"


def names_under(base: str) -> dict[str, Packing]:
    """base: of the names of all but the heads."""
    layer = base + ".encoder.layer.{i}."
    self_ = layer + "attention.self."
    return {
        "embedding.token.weight": Same(base + ".embeddings.word_embeddings.weight"),
        "embedding.position.weight": Same(base + ".embeddings.position_embeddings.weight"),
        "embedding.kind.weight": Same(base + ".embeddings.token_type_embeddings.weight"),
        "embedding.norm.weight": Same(base + ".embeddings.LayerNorm.weight"),
        "embedding.norm.bias": Same(base + ".embeddings.LayerNorm.bias"),
        "blocks.{i}.attention.qkv.weight": Grouped(self_ + "query.weight", self_ + "key.weight", self_ + "value.weight"),
        "blocks.{i}.attention.qkv.bias": Grouped(self_ + "query.bias", self_ + "key.bias", self_ + "value.bias"),
        "blocks.{i}.attention.output.weight": Same(layer + "attention.output.dense.weight"),
        "blocks.{i}.attention.output.bias": Same(layer + "attention.output.dense.bias"),
        "blocks.{i}.norm1.weight": Same(layer + "attention.output.LayerNorm.weight"),
        "blocks.{i}.norm1.bias": Same(layer + "attention.output.LayerNorm.bias"),
        "blocks.{i}.mlp.up.weight": Same(layer + "intermediate.dense.weight"),
        "blocks.{i}.mlp.up.bias": Same(layer + "intermediate.dense.bias"),
        "blocks.{i}.mlp.down.weight": Same(layer + "output.dense.weight"),
        "blocks.{i}.mlp.down.bias": Same(layer + "output.dense.bias"),
        "blocks.{i}.norm2.weight": Same(layer + "output.LayerNorm.weight"),
        "blocks.{i}.norm2.bias": Same(layer + "output.LayerNorm.bias"),
        "pooler.weight": Same(base + ".pooler.dense.weight"),
        "pooler.bias": Same(base + ".pooler.dense.bias"),
        "next_sentence.weight": Same("cls.seq_relationship.weight"),
        "next_sentence.bias": Same("cls.seq_relationship.bias"),
        "head.dense.weight": Same("cls.predictions.transform.dense.weight"),
        "head.dense.bias": Same("cls.predictions.transform.dense.bias"),
        "head.norm.weight": Same("cls.predictions.transform.LayerNorm.weight"),
        "head.norm.bias": Same("cls.predictions.transform.LayerNorm.bias"),
        "head.output.weight": Same("cls.predictions.decoder.weight"),
        "head.output.bias": Same("cls.predictions.bias"),
    }


def copies_under(base: str) -> dict[str, str]:
    return {
        "cls.predictions.decoder.weight": base + ".embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


NAMES = names_under("bert")


def read(told: Mapping[str, Any], names: frozenset[str]) -> BERTConfig:
    fixed(told, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    activation = told.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise HubError(f"config.json has hidden_act = {activation!r}; pyops has {', '.join(ACTIVATIONS)}")
    return BERTConfig(
        vocab_size=told["vocab_size"], sequence_length=told["max_position_embeddings"],
        num_layers=told["num_hidden_layers"], num_heads=told["num_attention_heads"], dim=told["hidden_size"],
        hidden=told["intermediate_size"], activation=ACTIVATIONS[activation], num_types=told.get("type_vocab_size", 2),
        norm_eps=told.get("layer_norm_eps", 1e-12), tied_head=told.get("tie_word_embeddings", True),
        pooled_head=told.get("architectures", [PRETRAINING])[0] == PRETRAINING,
        dropout=told.get("hidden_dropout_prob", 0.1), attention_dropout=told.get("attention_probs_dropout_prob", 0.1),
    )  # fmt: skip


def write(config: BERTConfig) -> dict[str, Any]:
    return {
        "architectures": [PRETRAINING if config.pooled_head else MASKED], "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "hidden_size": config.dim, "intermediate_size": config.mlp_width,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "type_vocab_size": config.num_types, "layer_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied_head,
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.attention_dropout,
    }  # fmt: skip


BERT_MODEL = Architecture(
    kind="bert",
    classes=(PRETRAINING, MASKED),
    model=BERT,
    config=BERTConfig,
    names=lambda config: NAMES,
    read=read,
    write=write,
    heads=lambda config: Heads(config.num_heads, config.num_heads, config.dim // config.num_heads),
    prefix="bert.",
    copies=copies_under("bert"),
    ignored=(r"embeddings\.(position_ids|token_type_ids)$",),
    renamed=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)

ROFORMER_MASKED = "RoFormerForMaskedLM"
ROFORMER_NAMES = names_under("roformer")


def read_roformer(told: Mapping[str, Any], names: frozenset[str]) -> BERTConfig:
    told = {**told, "embedding_size": told.get("embedding_size") or told["hidden_size"]}
    fixed(told, rotary_value=False, embedding_size=told["hidden_size"])
    return replace(read({**told, "architectures": [MASKED]}, names), positions="rotary")


def write_roformer(config: BERTConfig) -> dict[str, Any]:
    return write(config) | {"architectures": [ROFORMER_MASKED], "embedding_size": config.dim, "rotary_value": False}


ROFORMER = replace(
    BERT_MODEL,
    kind="roformer",
    classes=(ROFORMER_MASKED,),
    names=lambda config: ROFORMER_NAMES,
    read=read_roformer,
    write=write_roformer,
    prefix="roformer.",
    copies=copies_under("roformer"),
    ignored=(r"encoder\.embed_positions\.weight$",),  # sines and cosines, which are computed
)
