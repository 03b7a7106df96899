"""Adapters: few parameters that are trained beside a model that stays as it is.

lora = LoRA(model, rank=8, alpha=16, only=["blocks.*.attention.*"])    lora.parameters() are trained
lora.merge(); lora.unmerge(); lora.remove()                            W += alpha / r B A, and back
save(lora, folder); lora = load(model, folder)                         in the files of peft
freeze(model, except_=["blocks.11.*", "head.*"])                       the last layers alone
"""

from pyops.adapters.frozen import freeze
from pyops.adapters.lora import LoRA
from pyops.adapters.saving import load, save

__all__ = ["LoRA", "freeze", "load", "save"]
