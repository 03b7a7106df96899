"""Training loops of Hugging Face over pyops: Accelerate's and the Trainer's.

    Trainer(..., plan=ParallelPlan(tp=2))      transformers.Trainer on a plan: one import changes
    prepare(accelerator, model, optimizer)     a ZeroOptimizer in a loop of Accelerate
    ZeroTrainer(..., zero=ZeroConfig(stage=3))  transformers.Trainer over ZeroOptimizer
    class Mine(ZeroTraining, SFTTrainer)       the same for a Trainer of your own
    share_rows(model, ranks)                   rows of tokens over context parallel ranks
    apply_kernels(model)                       fused norms, MLPs and loss in a model of transformers

transformers and accelerate are imported when they are used.
"""

import importlib
from typing import Any

from pyops.hf.accelerate import prepare
from pyops.hf.plan_training import PlanTraining
from pyops.hf.trainer import ZeroTraining, trainer_class

__all__ = [
    "PlanTraining",
    "Trainer",
    "ZeroTrainer",
    "ZeroTraining",
    "apply_kernels",
    "prepare",
    "remove_kernels",
    "share_rows",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        return trainer_class(PlanTraining, name)
    if name == "ZeroTrainer":
        return trainer_class(ZeroTraining, name)
    if name in ("apply_kernels", "remove_kernels"):
        return getattr(importlib.import_module("pyops.hf.kernels"), name)
    if name == "share_rows":
        return importlib.import_module("pyops.hf.shared_rows").share_rows
    raise AttributeError(
        f"module 'pyops.hf' has no attribute {name!r}; it has {', '.join(__all__)}"
    )
