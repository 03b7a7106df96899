"""A pytest plugin that makes Triton's interpreter faster, with the same results.

kernel                     replaces the builtins of triton.language, and restores them behind it
   `--- device function    would look at every member of it again, though all are replaced: a
                           third of the time of a kernel that calls many
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

replace_all = interpreter._patch_builtin
one_of: dict[Any, str] = {}  # each module and class: the name of one builtin


def _replace(package: Any, *given: Any) -> None:
    if package not in one_of:
        names = (name for name, member in inspect.getmembers(package, tl.core.is_builtin))
        one_of[package] = next(names, "__doc__")
    name = one_of[package]
    if name == "__doc__" or tl.core.is_builtin(getattr(package, name)):
        replace_all(package, *given)


interpreter._patch_builtin = _replace
