"""Language models that are encoders, and torch.nn's own layers."""

from __future__ import annotations

__all__ = ["PLANS"]

BERT = {
    "word_embeddings": "vocabulary",
    "layer": "blocks",
    "predictions.decoder": "logits",
    "self": "attention",
    "self.query": "columns",
    "self.key": "columns",
    "self.value": "columns",
    "attention.output.dense": "head rows",
    "crossattention.output.dense": "head rows",
    "intermediate.dense": "columns",
    "output.dense": "rows",
}
ROBERTA = {**BERT, "lm_head.decoder": "logits"}
ELECTRA = {**BERT, "generator_lm_head": "logits"}
DISTILBERT = {
    "word_embeddings": "vocabulary",
    "layer": "blocks",
    "vocab_projector": "logits",
    "attention": "attention",
    "attention.[qkv]_lin": "columns",
    "attention.out_lin": "rows",
    "ffn.lin1": "columns",
    "ffn.lin2": "rows",
}
TORCH = {
    "layers": "blocks",
    "self_attn": "attention",
    "multihead_attn": "attention",
    "linear1": "columns",
    "linear2": "rows",
}

PLANS: dict[str, dict[str, str]] = {
    "BertLayer": BERT,
    "RobertaLayer": ROBERTA,
    "XLMRobertaLayer": ROBERTA,
    "CamembertLayer": ROBERTA,
    "ElectraLayer": ELECTRA,
    "EsmLayer": ROBERTA,
    "TransformerBlock": DISTILBERT,
    "TransformerEncoderLayer": TORCH,
    "TransformerDecoderLayer": TORCH,
}
