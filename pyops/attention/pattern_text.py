"""Patterns as text, as configurations have them: what `str(pattern)` gives, read back.

"BigBird(num_random_blocks=2, seed=1) | Longformer(global_block_indices=(0, 8))"
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import fields
from typing import Any

from pyops.attention.local_windows import Fixed, Variable
from pyops.attention.pattern import Pattern
from pyops.attention.windows import BigBird, Dense, Longformer, SlidingWindow

__all__ = ["pattern_from_text"]

KINDS = {
    kind.__name__: kind for kind in (Dense, Fixed, Variable, BigBird, Longformer, SlidingWindow)
}
MOST = 4096  # characters, so that nothing is parsed that nobody would write


def pattern_from_text(text: str) -> Pattern:
    """The pattern that a text names.

    Args:
        text: Classes with keyword arguments, joined by |; without arguments the parentheses may be
            left out, and lists stand for tuples.

    Returns:
        The pattern; `str` of it is a text of the same pattern.

    Raises:
        ValueError: For a text of another form, an unknown class or argument, or a value that the
            class refuses.
    """
    try:
        if len(text) > MOST:
            raise ValueError
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _unreadable(text) from None
    return _pattern(tree, text)


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"pattern is {text[:80]!r}; write classes of pyops.attention with keyword arguments, "
        'joined by |, such as "BigBird(num_random_blocks=2) | Longformer()"'
    )


def _pattern(node: ast.expr, text: str) -> Pattern:
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts.append(node.right)
        node = node.left
    found = _one(node, text)
    for part in reversed(parts):
        found = found | (_pattern(part, text) if isinstance(part, ast.BinOp) else _one(part, text))
    return found


def _one(node: ast.expr, text: str) -> Pattern:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise _unreadable(text)
    name = call.func.id
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
        raise ValueError(f"pattern has {name!r}, which is no pattern; {fix}")
    kind = KINDS[name]
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise _unreadable(text)
        if keyword.arg not in types:
            raise ValueError(
                f"pattern has {name}({keyword.arg}=), but it takes {', '.join(types) or 'nothing'}"
            )
        options[keyword.arg] = _value(f"{name}({keyword.arg}=)", keyword.value, types[keyword.arg])
    return kind(**options)


def _value(name: str, node: ast.expr, kind: str) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(
            f"pattern has {name} of {ast.unparse(node)[:40]!r}; {WANTED[kind]}"
        ) from None
    if isinstance(value, list):
        value = tuple(value)
    numbers = isinstance(value, tuple) and all(type(each) is int for each in value)
    fits = {
        "int": type(value) is int,
        "bool": type(value) is bool,
        "tuple[int, ...]": numbers,
        "tuple[int, ...] | None": numbers or value is None,
    }
    if not fits[kind]:
        raise ValueError(f"pattern has {name} of {str(value)[:40]!r}; {WANTED[kind]}")
    return value


WANTED = {
    "int": "give a whole number",
    "bool": "give True or False",
    "tuple[int, ...]": "give whole numbers in parentheses, such as (0, 8)",
    "tuple[int, ...] | None": "give whole numbers in parentheses, such as (4, 9), or None",
}
