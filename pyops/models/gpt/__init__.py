"""GPT: a decoder with the norms in front, which is GPT-2 or Llama by its options."""

from pyops.models.gpt.model import GPT, GPTBlock, GPTConfig, GPTEmbedding, GPTHead

__all__ = ["GPT", "GPTBlock", "GPTConfig", "GPTEmbedding", "GPTHead"]
