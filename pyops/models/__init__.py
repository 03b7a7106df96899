"""Transformers made of layers that the ranks of a group can share, and independent of how they are
trained.

GPT(GPTConfig(dim=256, num_layers=4), seed=0)    tokens [B, T] -> logits [B, T, V]; its options make
                                                 it GPT-2 or Llama
BERT(BERTConfig(...))                            tokens -> logits of masked tokens, and of the next
                                                 sentence; an option makes it RoFormer
BERTClassifier(BERTConfig(...), num_labels=8)    tokens -> logits of labels
T5(T5Config(...))                                tokens, decoder's tokens -> logits
ViT(ViTConfig(...))                              images -> logits of labels
CoAtNet(CoAtNetConfig.named("0"))                images -> logits of labels, by convolutions and
                                                 attention

Every model takes group= (tensor parallelism; by default pyops.mesh.ALONE, one process with the
whole model) and, but for CoAtNet, sequence_parallel=, which change no result;
model.loss(...) is the training loss, model.set_dropout(...) keys dropout for the next forward, and
layers() of all but T5 is [embedding, block, ..., block, head], for a pipeline to cut.
generate(model, prompts, max_new=100) continues texts, on any number of ranks; score(model, tokens)
says how likely texts are. pyops.hub loads them from folders of Hugging Face.
"""

from pyops.models.bert import BERT, BERTConfig
from pyops.models.classifier import BERTClassifier
from pyops.models.coatnet import CoAtNet, CoAtNetConfig
from pyops.models.generation import GeneratedRow, GenerateOptions, generate, sample, score
from pyops.models.gpt import GPT, GPTConfig
from pyops.models.t5 import T5, T5Config
from pyops.models.vit import ViT, ViTConfig

__all__ = [
    "BERT",
    "GPT",
    "T5",
    "BERTClassifier",
    "BERTConfig",
    "CoAtNet",
    "CoAtNetConfig",
    "GPTConfig",
    "GenerateOptions",
    "GeneratedRow",
    "T5Config",
    "ViT",
    "ViTConfig",
    "generate",
    "sample",
    "score",
]
