"""Models of an encoder and a decoder, of text and of speech."""

from __future__ import annotations

__all__ = ["PLANS"]

T5 = {
    "shared": "vocabulary",
    "embed_tokens": "vocabulary",
    "block": "blocks",
    "lm_head": "logits",
    "*Attention": "attention",
    "*Attention.[qkv]": "columns",
    "*Attention.o": "rows",
    "relative_attention_bias": "bias by head",
    "DenseReluDense": "mlp",
    "DenseReluDense.wi*": "columns",
    "DenseReluDense.wo": "rows",
}
BART = {
    "shared": "vocabulary",
    "embed_tokens": "vocabulary",
    "layers": "blocks",
    "lm_head": "logits",
    "proj_out": "logits",
    "self_attn": "attention",
    "self_attn.[qkv]_proj": "columns",
    "self_attn.out_proj": "rows",
    "encoder_attn": "attention",
    "encoder_attn.[qkv]_proj": "columns",
    "encoder_attn.out_proj": "rows",
    "fc1": "columns",
    "fc2": "rows",
}

PLANS: dict[str, dict[str, str]] = {
    "T5Block": T5,
    "BartEncoderLayer": BART,
    "BartDecoderLayer": BART,
    "WhisperEncoderLayer": BART,
    "WhisperDecoderLayer": BART,
}
