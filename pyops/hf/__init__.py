"""Training loops of Hugging Face over pyops: Accelerate's and the Trainer's.

    prepare(accelerator, model, optimizer)     a ZeroOptimizer in a loop of Accelerate
    ZeroTrainer(..., zero=ZeroConfig(stage=3))  transformers.Trainer over ZeroOptimizer
    class Mine(ZeroTraining, SFTTrainer)       the same for a Trainer of your own

transformers and accelerate are imported when they are used.
"""

from typing import Any

from pyops.hf.accelerate import prepare
from pyops.hf.trainer import ZeroTraining, zero_trainer

__all__ = ["ZeroTrainer", "ZeroTraining", "prepare"]


def __getattr__(name: str) -> Any:
    if name == "ZeroTrainer":
        return zero_trainer()
    raise AttributeError(
        f"module 'pyops.hf' has no attribute {name!r}; it has {', '.join(__all__)}"
    )
