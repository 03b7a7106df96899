"""Public names of earlier versions: an import of one raises an error that says where it is now."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MODULES", "RenamedFinder"]

MODULES = {
    "pyops.arena": "pyops.recompute.Arena",
    "pyops.comm.codec": "pyops.comm, as in `from pyops.comm import Int8, OneBit`",
    "pyops.comm.ddp": "pyops.comm, as in `from pyops.comm import ddp_hook`",
    "pyops.comm.error_feedback": "pyops.comm, as in `from pyops.comm import ErrorFeedback`",
    "pyops.comm.fsdp": "pyops.comm, as in `from pyops.comm import fsdp_reduce_scatter`",
    "pyops.comm.transport": "pyops.comm.collectives.transport",
    "pyops.display": "pyops.train.report.display",
    "pyops.metrics": "pyops.train.report.metrics",
    "pyops.ops.cross_entropy": "pyops.ops.layers.cross_entropy",
    "pyops.parallel": "pyops.config, as in `from pyops.config import ParallelConfig`",
    "pyops.schedules": "pyops.optim.lr_scheduler",
    "pyops.simulation": "pyops.cli.simulate",
    "pyops.tensor_parallel.architectures": "pyops.tensor_parallel.convert.architectures",
    "pyops.tensor_parallel.plans": "pyops.tensor_parallel.convert.plans",
    "pyops.tensor_parallel.regions": "pyops.tensor_parallel.functional.regions",
}


class RenamedFinder(MetaPathFinder):
    """The last finder of `sys.meta_path`: it is asked only for a module that no other finder has
    found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError with the new name for a module in MODULES; finds nothing."""
        if fullname in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} has a new name: {MODULES[fullname]}", name=fullname
            )
        return None
