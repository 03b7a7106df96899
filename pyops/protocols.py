"""Types that several subpackages share, so that none imports another for a name alone."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["ParamGroup"]

ParamGroup: TypeAlias = dict[str, Any]
"""An entry of `torch.optim.Optimizer.param_groups`: "params", a list of tensors, and options."""
