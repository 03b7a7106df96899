"""Tiny models of transformers with weights that all matter, what they compute, and their
folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor

__all__ = ["FAMILIES", "Family", "write_folder"]

VOCAB, BATCH, LENGTH = 53, 3, 7  # which 2 and 4 ranks don't divide
SIZES = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 26,
}
# Of the three pairs of a head one turns as ever, one is stretched, and one is in between.
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}


@dataclass(frozen=True)
class Family:
    """A class of transformers, and the configuration of a tiny one."""

    name: str
    model: type
    config: Any


def _t5(**changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 16,
        "d_kv": 6,
        "d_ff": 26,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
    }
    return transformers.T5Config(
        **sizes,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=0,
        **changes,
    )


def families() -> list[Family]:
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=11,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=1,
    )
    llama = {**SIZES, "max_position_embeddings": 11, "num_key_value_heads": 2, "head_dim": 6}
    bert = {**SIZES, "max_position_embeddings": 11, "type_vocab_size": 3}
    vit = {**SIZES, "image_size": 6, "patch_size": 2, "num_channels": 2, "num_labels": 5}
    del vit["vocab_size"]
    return [
        Family("gpt2", transformers.GPT2LMHeadModel, gpt2),
        Family(
            "llama",
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**llama, rope_theta=500.0),
        ),
        Family(
            "llama_tied",
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(
                **llama, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
            ),
        ),
        Family(
            "llama_stretched",
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**llama, rope_parameters=STRETCHED),
        ),
        Family("bert", transformers.BertForPreTraining, transformers.BertConfig(**bert)),
        Family(
            "bert_masked",
            transformers.BertForMaskedLM,
            transformers.BertConfig(**bert, hidden_act="gelu_new"),
        ),
        Family(
            "bert_rotary", transformers.RoFormerForMaskedLM, transformers.RoFormerConfig(**bert)
        ),
        Family("t5", transformers.T5ForConditionalGeneration, _t5()),
        Family(
            "t5_gated",
            transformers.T5ForConditionalGeneration,
            # Its head is not scaled: smaller weights give outputs of the others' size, and rounding
            # errors too.
            _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, initializer_factor=0.2),
        ),
        Family("vit", transformers.ViTForImageClassification, transformers.ViTConfig(**vit)),
    ]


FAMILIES = {family.name: family for family in families()}


def inputs(family: Family) -> dict[str, Tensor]:
    """What both models are given, under transformers' names."""
    generator = torch.Generator().manual_seed(7)

    def tokens(length: int = LENGTH, high: int = VOCAB) -> Tensor:
        return torch.randint(high, (BATCH, length), generator=generator)

    if family.name == "vit":
        return {"pixel_values": torch.randn(BATCH, 2, 6, 6, generator=generator)}
    found = {"input_ids": tokens()}
    if family.name.startswith(("bert", "t5")):
        found["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [2]])).long()
    if family.name.startswith("bert"):
        found["token_type_ids"] = tokens(high=3)
    if family.name.startswith("t5"):
        found["decoder_input_ids"] = tokens(5)
    return found


def write_folder(
    family: Family, folder: Path, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Write the model's folder; its outputs, and the inputs."""
    torch.manual_seed(3)
    model = family.model(family.config).eval()
    with torch.no_grad():
        for parameter in filter(
            lambda p: p.requires_grad, model.parameters()
        ):  # all but RoFormer's sines and cosines
            parameter.add_(torch.randn_like(parameter) * 0.15)
    given = inputs(family)
    with torch.no_grad():
        found = model(**given)
    model.save_pretrained(folder, **options)
    if family.name == "bert":
        return [found.prediction_logits, found.seq_relationship_logits], given
    return [found.logits], given
