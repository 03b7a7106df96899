"""Models of transformers so small that a test can train them, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

__all__ = ["MODELS", "batch_for", "make_model"]

VOCAB, HIDDEN, TOKENS = 64, 32, 9
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def _of(model: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**more: Any) -> nn.Module:
        made = getattr(transformers, config)(**{**options, **more})
        found: nn.Module = getattr(transformers, model)(made)
        return found

    return make


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": _of("LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "llama tied": _of("LlamaForCausalLM", "LlamaConfig", **LLAMA, tie_word_embeddings=True),
    "mistral": _of("MistralForCausalLM", "MistralConfig", **LLAMA),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8),
    "gemma": _of("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=8),
    "gemma2": _of("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, head_dim=8),
    "gemma3": _of("Gemma3ForCausalLM", "Gemma3TextConfig", **LLAMA, head_dim=8),
    "phi": _of("PhiForCausalLM", "PhiConfig", **{**LLAMA, "num_key_value_heads": 4}),
    "phi3": _of("Phi3ForCausalLM", "Phi3Config", **LLAMA, pad_token_id=0),
    "mixtral": _of("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4),
    "gpt2": _of(
        "GPT2LMHeadModel", "GPT2Config",
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=4, n_head=4, n_positions=64,
    ),
    "gpt-neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", **BERT),
    "opt": _of(
        "OPTForCausalLM", "OPTConfig",
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4,
        ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=HIDDEN,
    ),
    "bloom": _of(
        "BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=4, n_head=4
    ),
    "bert": _of("BertForMaskedLM", "BertConfig", **BERT),
    "bert classifier": _of("BertForSequenceClassification", "BertConfig", **BERT),
    "roberta": _of("RobertaForMaskedLM", "RobertaConfig", **BERT),
    "t5": _of(
        "T5ForConditionalGeneration", "T5Config",
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": _of(
        "BartForConditionalGeneration", "BartConfig",
        vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    ),
    "vit": _of(
        "ViTForImageClassification", "ViTConfig",
        image_size=16, patch_size=4, hidden_size=HIDDEN, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=48,
    ),
}  # fmt: skip


def make_model(name: str, *, seed: int = 0, **config: Any) -> nn.Module:
    """The model with the same values in every process, and matrices large enough to matter.

    Args:
        name: Of MODELS.
        seed: Of the values.
        config: Fields of the model's config that are to be others.
    """
    torch.manual_seed(seed)
    model = MODELS[name](**config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and name != "t5":  # whose first values are large enough
                parameter.mul_(3.0)
    return model


def batch_for(name: str, *, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows for the model, of random tokens, the second of them shorter than the others, with labels
    of which some do not count."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(high: int = VOCAB) -> Tensor:
        return torch.randint(3, high, (rows, TOKENS), generator=generator)

    if name == "vit":
        pixels = torch.randn(rows, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1:2, 6:] = 0
    if name == "bert classifier":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows) % 2}
    labels = tokens()
    if name not in ("bert", "roberta", "t5", "bart"):
        labels = ids.clone()
    labels[torch.rand(rows, TOKENS, generator=generator) < 0.2] = -100
    if name not in ("t5", "bart"):
        labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
