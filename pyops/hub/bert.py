"""BERT (BertForPreTraining, BertForMaskedLM): token types, norms behind the residuals, masked-token head, pooled head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyops.hub.architecture import Architecture, fixed
from pyops.hub.files import HubError
from pyops.hub.packing import Grouped, Heads, Same
from pyops.models import BERT, BERTConfig

__all__ = ["BERT_MODEL"]

LAYER = "bert.encoder.layer.{i}."
SELF = LAYER + "attention.self."
NAMES = {
    "embedding.token.weight": Same("bert.embeddings.word_embeddings.weight"),
    "embedding.position.weight": Same("bert.embeddings.position_embeddings.weight"),
    "embedding.kind.weight": Same("bert.embeddings.token_type_embeddings.weight"),
    "embedding.norm.weight": Same("bert.embeddings.LayerNorm.weight"),
    "embedding.norm.bias": Same("bert.embeddings.LayerNorm.bias"),
    "blocks.{i}.attention.qkv.weight": Grouped(SELF + "query.weight", SELF + "key.weight", SELF + "value.weight"),
    "blocks.{i}.attention.qkv.bias": Grouped(SELF + "query.bias", SELF + "key.bias", SELF + "value.bias"),
    "blocks.{i}.attention.output.weight": Same(LAYER + "attention.output.dense.weight"),
    "blocks.{i}.attention.output.bias": Same(LAYER + "attention.output.dense.bias"),
    "blocks.{i}.norm1.weight": Same(LAYER + "attention.output.LayerNorm.weight"),
    "blocks.{i}.norm1.bias": Same(LAYER + "attention.output.LayerNorm.bias"),
    "blocks.{i}.mlp.up.weight": Same(LAYER + "intermediate.dense.weight"),
    "blocks.{i}.mlp.up.bias": Same(LAYER + "intermediate.dense.bias"),
    "blocks.{i}.mlp.down.weight": Same(LAYER + "output.dense.weight"),
    "blocks.{i}.mlp.down.bias": Same(LAYER + "output.dense.bias"),
    "blocks.{i}.norm2.weight": Same(LAYER + "output.LayerNorm.weight"),
    "blocks.{i}.norm2.bias": Same(LAYER + "output.LayerNorm.bias"),
    "pooler.weight": Same("bert.pooler.dense.weight"),
    "pooler.bias": Same("bert.pooler.dense.bias"),
    "next_sentence.weight": Same("cls.seq_relationship.weight"),
    "next_sentence.bias": Same("cls.seq_relationship.bias"),
    "head.dense.weight": Same("cls.predictions.transform.dense.weight"),
    "head.dense.bias": Same("cls.predictions.transform.dense.bias"),
    "head.norm.weight": Same("cls.predictions.transform.LayerNorm.weight"),
    "head.norm.bias": Same("cls.predictions.transform.LayerNorm.bias"),
    "head.output.weight": Same("cls.predictions.decoder.weight"),
    "head.output.bias": Same("cls.predictions.bias"),
}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
PRETRAINING, MASKED = "BertForPreTraining", "BertForMaskedLM"


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
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=(r"embeddings\.(position_ids|token_type_ids)$",),
    renamed=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)
