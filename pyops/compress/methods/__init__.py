"""What each step does to a model: `apply_step(work, step)`.

| file | what it does |
|---|---|
| work.py | a model on its way through the steps |
| learned.py | distill, finetune |
| pruned.py | prune |
| quantized.py | quantize |
| fitting.py | whether a step fits the model that it will be given |
| apply.py | which step is whose, and whether it did anything |
"""

from pyops.compress.methods.apply import apply_step
from pyops.compress.methods.fitting import check_step, skeleton_of
from pyops.compress.methods.work import Work

__all__ = ["Work", "apply_step", "check_step", "skeleton_of"]
