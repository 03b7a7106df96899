"""GPT: a decoder with the norms in front, which is GPT-2 or Llama by its options."""

from pyops.models.gpt.config import GPTConfig
from pyops.models.gpt.layers import GPTBlock, GPTEmbedding, GPTHead
from pyops.models.gpt.model import GPT

__all__ = ["GPT", "GPTBlock", "GPTConfig", "GPTEmbedding", "GPTHead"]
