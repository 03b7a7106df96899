"""BERT (BertForPreTraining, BertForMaskedLM): token types, norms behind the residuals, masked-token
head, pooled head.

RoFormer (RoFormerForMaskedLM) is the same with rotary positions in place of learned ones, and
without the pooled head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyops.hub.architectures.architecture import Architecture
from pyops.hub.architectures.encoder_mapping import (
    attention_shape,
    layer_names,
    read_sizes,
    write_sizes,
)
from pyops.hub.config_fields import ConfigFields
from pyops.hub.weight_packing import Packing, Same
from pyops.models import BERT, BERTConfig
from pyops.models.rotary import Rotary

__all__ = ["BERT_MODEL", "ROFORMER"]

PRETRAINING, MASKED = "BertForPreTraining", "BertForMaskedLM"


def names_under(base: str) -> dict[str, Packing]:
    """base: of the names of all but the heads."""
    layer = layer_names(
        base + ".encoder.layer.{i}.",
        attention="attention.self.",
        norm1="attention.output.LayerNorm",
        norm2="output.LayerNorm",
    )
    return {
        "embedding.token.weight": Same(base + ".embeddings.word_embeddings.weight"),
        "embedding.position.weight": Same(base + ".embeddings.position_embeddings.weight"),
        "embedding.kind.weight": Same(base + ".embeddings.token_type_embeddings.weight"),
        "embedding.norm.weight": Same(base + ".embeddings.LayerNorm.weight"),
        "embedding.norm.bias": Same(base + ".embeddings.LayerNorm.bias"),
        **layer,
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


def names_of(base: str) -> Callable[[BERTConfig], Mapping[str, Packing]]:
    """Of a configuration. A head that is not tied has its own bias; otherwise it is
    cls.predictions.bias, or its copy."""
    tied = names_under(base)
    untied = {**tied, "head.output.bias": Same("cls.predictions.decoder.bias")}
    return lambda config: tied if config.tied_head else untied


def read(
    fields: ConfigFields,
    names: frozenset[str],
    *,
    pooled_head: bool | None = None,
    rotary: bool = False,
) -> BERTConfig:
    fields.fixed(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    length = fields.positions if rotary else fields.integer
    classes = fields.raw("architectures") or [PRETRAINING]
    return BERTConfig(
        vocab_size=fields.integer("vocab_size"),
        sequence_length=length("max_position_embeddings"),
        num_types=fields.integer("type_vocab_size", 2),
        tied_head=fields.flag("tie_word_embeddings", True),
        positions="rotary" if rotary else "learned",
        pooled_head=classes[0] == PRETRAINING if pooled_head is None else pooled_head,
        **read_sizes(fields, dropout=0.1),
    )


def write(config: BERTConfig) -> dict[str, Any]:
    return {
        "architectures": [PRETRAINING if config.pooled_head else MASKED],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "type_vocab_size": config.num_types,
        "tie_word_embeddings": config.tied_head,
        **write_sizes(config),
    }


BERT_MODEL = Architecture(
    kind="bert",
    classes=(PRETRAINING, MASKED),
    model=BERT,
    config=BERTConfig,
    names=names_of("bert"),
    read=read,
    write=write,
    heads=attention_shape,
    prefix="bert.",
    copies=copies_under("bert"),
    ignored=(r"embeddings\.(position_ids|token_type_ids)$",),
    renamed=(
        ("LayerNorm.weight", "LayerNorm.gamma"),
        ("LayerNorm.bias", "LayerNorm.beta"),
        # The two were one tensor until transformers 5, and a file may have either name for it.
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
)

ROFORMER_MASKED = "RoFormerForMaskedLM"


def read_roformer(fields: ConfigFields, names: frozenset[str]) -> BERTConfig:
    fields.fixed(rotary_value=False)
    if fields.raw("embedding_size") is not None:
        fields.fixed(embedding_size=fields.integer("hidden_size"))
    return read(fields, names, pooled_head=False, rotary=True)


def angles(config: BERTConfig) -> dict[str, Tensor]:
    """Sines and cosines of all positions as files hold them, which transformers computes with
    whatever they are."""
    rotary = Rotary(
        config.sequence_length,
        config.dim // config.num_heads,
        theta=config.rotary_theta,
        device="cpu",
    )
    cos, sin = rotary.table_2TK
    return {"roformer.encoder.embed_positions.weight": torch.cat([sin, cos], dim=1)}


def write_roformer(config: BERTConfig) -> dict[str, Any]:
    return write(config) | {
        "architectures": [ROFORMER_MASKED],
        "embedding_size": config.dim,
        "rotary_value": False,
    }


ROFORMER = replace(
    BERT_MODEL,
    kind="roformer",
    classes=(ROFORMER_MASKED,),
    names=names_of("roformer"),
    read=read_roformer,
    write=write_roformer,
    prefix="roformer.",
    copies=copies_under("roformer"),
    ignored=(),
    computed=angles,
)
