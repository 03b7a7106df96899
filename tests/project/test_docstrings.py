"""Every public name has a docstring: what a subpackage's `__all__` lists, and its public
methods."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import pyops

pytestmark = pytest.mark.cpu_only


def public(room: str) -> Iterator[tuple[str, Any]]:
    """The public names of a subpackage, and the methods and properties of its classes."""
    module = importlib.import_module(f"pyops.{room}")
    yield f"pyops.{room}", module
    for name in module.__all__:
        value = getattr(module, name)
        yield f"pyops.{room}.{name}", value
        if inspect.isclass(value) and value.__module__.startswith("pyops."):
            yield from methods(f"pyops.{room}.{name}", value)


def methods(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines itself."""
    for attribute, value in vars(kind).items():
        value = getattr(value, "__func__", value)
        if not attribute.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property)
        ):
            yield f"{name}.{attribute}", getattr(kind, attribute)


def undocumented(named: Iterator[tuple[str, Any]]) -> list[str]:
    """Those without a docstring, of their own or of what they override."""
    return [
        name
        for name, value in named
        if (inspect.isroutine(value) or isinstance(value, type | property | ModuleType))
        and not (inspect.getdoc(value) or "").strip()
    ]


@pytest.mark.parametrize("room", sorted(pyops._ROOMS))
def test_public_names_have_docstrings(room):
    assert undocumented(public(room)) == []


def test_a_name_without_a_docstring_is_found():
    class Documented:
        """A class."""

        def there(self):
            """A method."""

        def lacking(self):
            pass

        @property
        def also_lacking(self):
            return 0

        def _private(self):
            pass

    assert undocumented(methods("D", Documented)) == ["D.lacking", "D.also_lacking"]
    assert undocumented(iter([("f", lambda: 0), ("D", Documented), ("n", 3)])) == ["f"]
