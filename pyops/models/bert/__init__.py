"""BERT: an encoder with the norms behind the residuals, which is RoFormer by an option."""

from pyops.models.bert.config import BERTConfig
from pyops.models.bert.layers import BERTEmbedding, make_blocks
from pyops.models.bert.model import BERT

__all__ = ["BERT", "BERTConfig", "BERTEmbedding", "make_blocks"]
