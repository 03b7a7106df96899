"""Language models that are decoders alone."""

from __future__ import annotations

__all__ = ["PLANS"]

GPT2 = {
    "wte": "vocabulary",
    "h": "blocks",
    "lm_head": "logits",
    "attn": "attention",
    "attn.c_attn": "packed columns",
    "attn.c_proj": "rows",
    "crossattention": "attention",
    "crossattention.q_attn": "columns",
    "crossattention.c_attn": "packed columns",
    "crossattention.c_proj": "rows",
    "mlp.c_fc": "columns",
    "mlp.c_proj": "rows",
}
_SPLIT = {
    "embed_tokens": "vocabulary",
    "layers": "blocks",
    "lm_head": "logits",
    "self_attn": "attention",
    "self_attn.[qkv]_proj": "columns",
}
_GATED = {
    "mlp": "mlp",
    "mlp.gate_proj": "columns",
    "mlp.up_proj": "columns",
    "mlp.down_proj": "rows",
}
LLAMA = {**_SPLIT, "self_attn.o_proj": "rows", **_GATED}
# Norms of each query and key, over the width of a head.
HEAD_NORMS = {**LLAMA, "self_attn.[qk]_norm": "partial"}
PHI = {**_SPLIT, "self_attn.dense": "rows", "mlp.fc1": "columns", "mlp.fc2": "rows"}
PHI3 = {
    "embed_tokens": "vocabulary",
    "layers": "blocks",
    "lm_head": "logits",
    "self_attn": "configured attention",
    "self_attn.qkv_proj": "packed columns",
    "self_attn.o_proj": "rows",
    "mlp.gate_up_proj": "gate and up",
    "mlp.down_proj": "rows",
}
GLM = {
    **_SPLIT,
    "self_attn.o_proj": "rows",
    "mlp.gate_up_proj": "gate and up",
    "mlp.down_proj": "rows",
}
TWO = {**_SPLIT, "self_attn.o_proj": "rows", "mlp.up_proj": "columns", "mlp.down_proj": "rows"}
STARCODER2 = {**_SPLIT, "self_attn.o_proj": "rows", "mlp.c_fc": "columns", "mlp.c_proj": "rows"}
OPT = {**_SPLIT, "self_attn.out_proj": "rows", "fc1": "columns", "fc2": "rows"}
_FUSED = {"mlp.dense_h_to_4h": "columns", "mlp.dense_4h_to_h": "rows", "lm_head": "logits"}
NEOX = {
    "embed_in": "vocabulary",
    "layers": "blocks",
    "attention": "attention",
    "attention.query_key_value": "head columns",
    "attention.dense": "rows",
    **_FUSED,
}
BLOOM = {
    "word_embeddings": "vocabulary",
    "h": "blocks",
    "self_attention": "attention",
    "self_attention.query_key_value": "head columns",
    "self_attention.dense": "rows",
    **_FUSED,
}
PERSIMMON = {
    "embed_tokens": "vocabulary",
    "layers": "blocks",
    "self_attn": "attention",
    "self_attn.query_key_value": "head columns",
    "self_attn.dense": "rows",
    "self_attn.[qk]_layernorm": "partial",
    **_FUSED,
}

BIOGPT = {**OPT, "output_projection": "logits"}
MPT = {
    "wte": "vocabulary",
    "blocks": "blocks",
    "lm_head": "logits",
    "attn": "attention",
    "attn.Wqkv": "packed columns",
    "attn.out_proj": "rows",
    "ffn.up_proj": "columns",
    "ffn.down_proj": "rows",
}


# Gemma 3 with pictures has CLIP's sort of layers beside its own.
GEMMA3 = {**HEAD_NORMS, "self_attn.out_proj": "rows", "mlp.fc1": "columns", "mlp.fc2": "rows"}

PLANS: dict[str, dict[str, str]] = {
    "GPT2Block": GPT2,
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Qwen2DecoderLayer": LLAMA,
    "Qwen3DecoderLayer": HEAD_NORMS,
    "GemmaDecoderLayer": LLAMA,
    "Gemma2DecoderLayer": LLAMA,
    "Gemma3DecoderLayer": GEMMA3,
    "GraniteDecoderLayer": LLAMA,
    "OlmoDecoderLayer": LLAMA,
    "StableLmDecoderLayer": LLAMA,
    "GlmDecoderLayer": GLM,
    "PhiDecoderLayer": PHI,
    "Phi3DecoderLayer": PHI3,
    "OPTDecoderLayer": OPT,
    "GPTNeoXLayer": NEOX,
    "BloomBlock": BLOOM,
    "FalconDecoderLayer": BLOOM,
    "PersimmonDecoderLayer": PERSIMMON,
    "Starcoder2DecoderLayer": STARCODER2,
    "XGLMDecoderLayer": OPT,
    "BioGptDecoderLayer": BIOGPT,
    "MptBlock": MPT,
}
