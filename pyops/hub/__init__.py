"""Models to and from Hugging Face folders, at any number of tensor-parallel ranks.

load(folder, group=...) -> model       GPT, BERT, T5 or ViT; each rank reads the parts that it holds
save(model, folder, group=...)         config.json and safetensors files that transformers reads
to_checkpoint, from_checkpoint         between such folders and checkpoints; `pyops convert`

Known: GPT-2, Llama, BERT, RoFormer, T5 (1.0 and 1.1), ViT; and, to read, CoAtNet of timm. What is
called how, and packed how, stands in a table each, in `pyops.hub.architectures`.
"""

from pyops.hub.checkpoint_conversion import from_checkpoint, to_checkpoint
from pyops.hub.folder_files import HubError, is_hub_folder
from pyops.hub.folder_loading import load
from pyops.hub.folder_saving import save

__all__ = ["HubError", "from_checkpoint", "is_hub_folder", "load", "save", "to_checkpoint"]
