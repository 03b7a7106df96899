"""BERT: an encoder with the norms behind the residuals, which is RoFormer by an option."""

from pyops.models.bert.model import BERT, BERTConfig, BERTEmbedding, make_blocks

__all__ = ["BERT", "BERTConfig", "BERTEmbedding", "make_blocks"]
