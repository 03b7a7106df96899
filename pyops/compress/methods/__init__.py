"""What each step does to a model: `apply_step(work, step)`.

| file | what it does |
|---|---|
| work.py | a model on its way through the steps |
| learned.py | distill, finetune |
| apply.py | which step is whose, and whether it did anything |
"""

from pyops.compress.methods.apply import apply_step, check_step
from pyops.compress.methods.work import Work

__all__ = ["Work", "apply_step", "check_step"]
