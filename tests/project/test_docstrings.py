"""Every public name has a docstring: what a subpackage's `__all__` lists, and its public methods;
with several arguments the docstring says what each of them is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import textwrap
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


FEW = 2  # arguments that a sentence can name


def silent(named: Iterator[tuple[str, Any]]) -> list[str]:
    """Functions and classes of more than FEW arguments without `Args:`, of their own or of what
    they override; a class may have `Attributes:`, or a docstring under each field."""
    found = []
    for name, value in named:
        if not (inspect.isfunction(value) or isinstance(value, type)):
            continue
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):  # an exception, or a class of torch
            continue
        own = [p for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        text = inspect.getdoc(value) or ""
        if isinstance(value, type):
            text += inspect.getdoc(value.__init__) or ""
        if len(own) <= FEW or "Args:" in text or "Attributes:" in text:
            continue
        overridden = [getattr(kind, value.__name__, None) for kind in bases(value)]
        if any("Args:" in (inspect.getdoc(each) or "") for each in overridden):
            continue
        if not (isinstance(value, type) and has_field_docstrings(value)):
            found.append(name)
    return found


def bases(function: Any) -> list[type]:
    """The classes whose method this one overrides."""
    outer = getattr(function, "__qualname__", "").rpartition(".")[0]
    kind = getattr(inspect.getmodule(function), outer, None)
    return list(kind.__mro__[1:]) if isinstance(kind, type) else []


def has_field_docstrings(kind: type) -> bool:
    """Whether each field of a dataclass is followed by a docstring."""
    if not dataclasses.is_dataclass(kind):
        return False
    documented = set()
    for each in kind.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                documented.add(ast.unparse(field.target))
    return {field.name for field in dataclasses.fields(kind)} <= documented


@pytest.mark.parametrize("room", sorted(pyops._ROOMS))
def test_several_arguments_are_described(room):
    assert silent(public(room)) == []


def test_a_function_that_is_silent_about_its_arguments_is_found():
    def silent_one(a, b, c):
        """Adds."""

    def telling(a, b, c):
        """Adds.

        Args:
            a, b, c: numbers.
        """

    assert silent(iter([("silent_one", silent_one), ("telling", telling)])) == ["silent_one"]


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
