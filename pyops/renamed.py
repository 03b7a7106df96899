"""Public names of earlier versions: the use of one raises an error that says the new name.

`MODULES` has modules, `ATTRIBUTES` names within modules, which `missing_attribute` answers;
`refuse_renamed` refuses keyword arguments. The table "Changed names" of
CHANGELOG.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ATTRIBUTES", "MODULES", "RenamedFinder", "missing_attribute", "refuse_renamed"]

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
    "pyops.schedules": "pyops.optim.lr_scheduler",
    "pyops.simulation": "pyops.cli.simulate",
    "pyops.tensor_parallel.architectures": "pyops.tensor_parallel.convert.architectures",
    "pyops.tensor_parallel.plans": "pyops.tensor_parallel.convert.plans",
    "pyops.tensor_parallel.regions": "pyops.tensor_parallel.functional.regions",
}

# Module -> {old name: new name}; the module's __getattr__ calls `missing_attribute`.
ATTRIBUTES = {
    "pyops.checkpoint": {"Stored": "LazyTensor"},
    "pyops.elastic": {
        "Active": "LayoutGroups",
        "Change": "LayoutChange",
        "Move": "LayerMove",
        "Portion": "PaddedBatch",
        "Prefix": "FrozenLayers",
        "Share": "ReplicaBatch",
        "Times": "CacheTimes",
        "giving_up": "abort_on_failure",
        "message_group": "make_control_group",
    },
    "pyops.pipeline": {"Plan": "PipelinePlan", "Remedies": "PipeMareOptions"},
    "pyops.tensor_parallel": {
        "Past": "KVCache",
        "finish_gradients": "sync_partial_grads",
        "initialise_": "initialize_",
        "initialise_model_": "initialize_model_",
    },
    "pyops.train": {"Run": "TrainingLoop"},
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


def missing_attribute(module: str, name: str) -> Exception:
    """The error for a name that a module does not have.

    Args:
        module: the module, such as "pyops.tensor_parallel".
        name: what was asked for.

    Returns:
        An ImportError with the new name, where `ATTRIBUTES` has one: `from module import name`
        would replace the text of an AttributeError. Otherwise an AttributeError.
    """
    if name in ATTRIBUTES.get(module, {}):
        return ImportError(f"{module}.{name} has a new name: {ATTRIBUTES[module][name]}", name=name)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def refuse_renamed(who: str, arguments: Mapping[str, object], renamed: Mapping[str, str]) -> None:
    """Refuse the keyword arguments that a function does not know, the renamed ones by both names.

        def step(loss, *, reduction="mean", **unknown):
            refuse_renamed("step", unknown, {"op": "reduction"})

    Args:
        who: the function or class, for the error.
        arguments: the keyword arguments that it has no parameter for.
        renamed: old name -> new name, or what to write instead, such as "group=ALONE".

    Raises:
        TypeError: there is one, as Python raises it; the error names the argument and its new name.
    """
    for name in arguments:
        if name in renamed:
            raise TypeError(f"{who}: the argument {name} has a new name: {renamed[name]}")
        raise TypeError(f"{who}() got an unexpected keyword argument {name!r}")
