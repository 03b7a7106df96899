"""A module tree as it was: what `parallelize` puts back where it can't finish."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Snapshot"]


class Snapshot:
    """All modules' attributes, parameters, buffers, submodules and hooks by identity, and which
    parameters require gradients. The values of tensors are not kept."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        self._kept: list[tuple[nn.Module, type, dict[str, Any], dict[str, dict[Any, Any]]]] = []
        for module in model.modules():
            inner = {
                key: dict(value)
                for key, value in module.__dict__.items()
                if isinstance(value, dict)
            }
            self._kept.append((module, type(module), dict(module.__dict__), inner))

    def restore(self) -> None:
        """Every module of the tree is what it was when the snapshot was made."""
        for module, kind, attributes, inner in self._kept:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, content in inner.items():
                attributes[key].clear()
                attributes[key].update(content)
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
