"""ModuleHook: a hook that stays behind when its module is copied or pickled, such as for an average
of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHook"]


class ModuleHook:
    """Calls `call` on the module that it was registered on, and does nothing on copies:
    `copy.deepcopy` copies hooks, too.

    Args:
        call: the hook, as `torch.nn.Module.register_forward_hook` and its relatives call it; None
        does nothing.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()
