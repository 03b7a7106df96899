"""Optimizers: torch.optim's interface over one fused pass through memory.

    optimizer = pyops.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_grad_norm=1.0,
                                  zero_grad=True)
    loss.backward()
    optimizer.step()        # norm, clip, step, zero_grad: 36 bytes per float32 parameter, not 44
    optimizer.grad_norm     # before clipping, a tensor

Drop-in for torch.optim: param groups, closures, LR schedulers, GradScaler, state_dict both ways,
CUDA graphs. `fused` holds what the optimizers share, `backward` steps each parameter as its
gradient arrives, `lr_scheduler` has schedules that torch lacks. They know no process group; of a
DTensor they step what this rank holds, and pyops.flat.dtensor sums over its mesh. OneBitAdam,
OneBitLAMB and ZeroOneAdam, which communicate themselves, live one layer up in pyops.onebit; they
are found here too.
"""

import importlib
from typing import Any

from pyops.optim.adafactor import Adafactor
from pyops.optim.adagrad import Adagrad
from pyops.optim.adam import Adam, AdamW
from pyops.optim.backward import fuse_into_backward
from pyops.optim.lamb import LAMB
from pyops.optim.lars import LARS
from pyops.optim.lbfgs import LBFGS
from pyops.optim.lion import Lion
from pyops.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "LBFGS",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "fuse_into_backward",
]

_COMMUNICATING = ("OneBitAdam", "OneBitLAMB", "ZeroOneAdam")


def __getattr__(name: str) -> Any:
    # By name, when somebody asks: nothing in this room needs the room above.
    if name in _COMMUNICATING:
        return getattr(importlib.import_module("pyops.onebit"), name)
    raise AttributeError(
        f"module 'pyops.optim' has no attribute {name!r}; it has "
        f"{sorted((*__all__, *_COMMUNICATING))}"
    )
