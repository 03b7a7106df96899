"""pyops: fused optimizers, collectives and parallel layers for models that one device can't hold or
can't feed.

    batch -> model -> backward -> buckets -> collective -> optimizer -> checkpoint
             models   flat        comm       comm          optim        checkpoint

Rooms are imported when they are first used, so `import pyops` is light and `pyops.optim.AdamW` just
works.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from pyops.renamed import MODULES, RenamedFinder

if TYPE_CHECKING:
    from pyops.ops.library import has_kernel

__version__ = "0.1.0"

__all__ = ["__version__", "has_kernel"]

_ROOMS = frozenset(
    [
        "ops",
        "host_heap",
        "host_memory",
        "failure",
        "launchers",
        "flight_record",
        "mesh",
        "flat",
        "random",
        "deferred",
        "optim",
        "comm",
        "offload",
        "precision",
        "attention",
        "data_parallel",
        "local_sgd",
        "healing",
        "onebit",
        "recompute",
        "zero",
        "parameter_server",
        "sandblaster",
        "tensor_parallel",
        "context_parallel",
        "pipeline",
        "checkpoint",
        "models",
        "data",
        "token_data",
        "hub",
        "distill",
        "pruning",
        "hf",
        "elastic",
        "adapters",
        "quantized",
        "parallel",
        "plan",
        "launch",
        "observe",
        "config",
        "train",
        "compress",
        "cli",
    ]
)


if not any(isinstance(finder, RenamedFinder) for finder in sys.meta_path):
    sys.meta_path.append(RenamedFinder())


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"pyops.{name}")
    if name == "has_kernel":
        return importlib.import_module("pyops.ops.library").has_kernel
    if new := MODULES.get(f"pyops.{name}"):
        raise AttributeError(f"pyops.{name} has a new name: {new}")
    raise AttributeError(
        f"module 'pyops' has no attribute {name!r}; it has {', '.join(sorted([*__all__, *_ROOMS]))}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS, "has_kernel"])
