"""Models that know nothing of how they are trained: a model is a list of layers whose composition is its forward.

GPT(GPTConfig(dim=256, num_layers=4), seed=0)      tokens [B, T] -> logits [B, T, V]
GPT.layers()                                       [embedding, block, ..., block, head], for a pipeline to cut
sample(model, prompt, num_tokens=100)              continues a text
"""

from pyops.models.gpt import GPT, GPTConfig
from pyops.models.sampling import sample

__all__ = ["GPT", "GPTConfig", "sample"]
