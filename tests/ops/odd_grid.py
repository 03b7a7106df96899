"""Every op of the library with every tensor argument replaced by each odd tensor; run in a process
of its own, which may die.

python -m tests.ops.odd_grid all|diagonal FIRST       one line when a case begins, one when it fails
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import pyops.ops
from pyops.ops.memory import resolved_view
from tests.odd_input.runs import go_through
from tests.odd_input.tensors import ODD, WITHOUT_MEMORY, bits_of
from tests.ops.samples import SAMPLES, UNTRACEABLE

Place = tuple[int, int | None]  # of an argument, and of a tensor in a list
REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)
CPU = torch.device("cpu")


def sample(op: str) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(5)
    args, kwargs = SAMPLES[op](CPU)
    return [list(a) if isinstance(a, list) else a for a in args], kwargs


def places(op: str) -> Iterator[Place]:
    """Of the tensors of a sample; of a list, the last."""
    for i, argument in enumerate(sample(op)[0]):
        if isinstance(argument, Tensor):
            yield i, None
        elif isinstance(argument, list) and argument and isinstance(argument[-1], Tensor):
            yield i, len(argument) - 1


def cases(which: str) -> list[tuple[str, Place, str]]:
    """All, or the odd tensors dealt out to the ops' arguments in turn, each at least once."""
    spots = [(op, place) for op in sorted(SAMPLES) for place in places(op)]
    if which == "all":
        return [(op, place, odd) for op, place in spots for odd in ODD]
    names = list(ODD)
    return [(op, place, names[i % len(names)]) for i, (op, place) in enumerate(spots)]


def with_odd(
    op: str, place: Place, odd: str, *, plain: bool = False
) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """A sample with one tensor replaced, and all tensors that a call may read or change. plain: a
    view that is still to be computed is computed."""
    changed = (
        ODD[odd]
        if not plain
        else lambda t: (
            made.contiguous()
            if (made := resolved_view(odd_one := ODD[odd](t))) is not odd_one
            else made
        )
    )
    args, kwargs = sample(op)
    kept = list(args[0].keep_alive) if op in UNTRACEABLE else []
    i, j = place
    if j is None:
        args[i] = changed(args[i])
    else:
        args[i][j] = changed(args[i][j])
    tensors = [
        t
        for a in (*args, *kept)
        for t in (a if isinstance(a, list) else [a])
        if isinstance(t, Tensor)
    ]
    if kept:
        tensors[0].keep_alive = kept  # type: ignore[attr-defined]
    return args, kwargs, tensors


def reference_of(op: str) -> Any:
    name = f"{op.removesuffix('_')}_reference"
    for stem in importlib.import_module("tests.ops.test_library").STEMS:
        if hasattr(module := getattr(pyops.ops, stem), name):
            return getattr(module, name)
    raise AssertionError(op)


def results_of(call: Any, op: str, place: Place, odd: str, *, plain: bool = False) -> list[Tensor]:
    args, kwargs, tensors = with_odd(op, place, odd, plain=plain)
    with torch.no_grad():
        out = call(*args, **kwargs)
    given = (
        [out]
        if isinstance(out, Tensor)
        else [t for t in out or () if isinstance(t, Tensor)]
        if out is not True
        else []
    )
    if op == "optimizer_table":
        return []
    # A table's numbers are pointers to the tensors behind it, which are others in each call.
    compared = tensors[1:] if op in UNTRACEABLE else tensors
    return [
        resolved_view(t).detach().clone()
        for t in (*given, *compared)
        if t._is_zerotensor() or bits_of(t) is not None
    ]


def problem(op: str, place: Place, odd: str) -> str | None:
    """What is wrong with an op's answer, or None."""
    try:
        args, kwargs, tensors = with_odd(op, place, odd)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # torch makes no such tensor
    before = [bits_of(t) for t in tensors]
    try:
        with torch.no_grad():
            getattr(torch.ops.pyops, op).default(*args, **kwargs)
    except REFUSALS as error:
        if len(str(error)) < 20:
            return f"says only {error!r}"
        after = [bits_of(t) for t in tensors]
        same = all(
            a is None or (b is not None and torch.equal(a, b))
            for a, b in zip(before, after, strict=True)
        )
        return None if same else f"changed its arguments and raised {error}"
    replaced = args[place[0]] if place[1] is None else args[place[0]][place[1]]
    if odd in WITHOUT_MEMORY and replaced.numel() and op != "gradients_fit":
        return "ran on memory that is not there"
    try:
        expected = results_of(reference_of(op), op, place, odd, plain=True)
    except Exception as error:
        if odd == "meta" and isinstance(error, NotImplementedError):
            return None  # plain torch looks at numbers, of which the op's answer has none
        return f"ran where plain torch raises {type(error).__name__}: {error}"
    actual = results_of(getattr(torch.ops.pyops, op).default, op, place, odd)
    try:
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                a, e, rtol=2**-7 if a.dtype == torch.bfloat16 else 1e-3, atol=1e-6, equal_nan=True
            )
    except AssertionError as error:
        return f"differs from plain torch: {' '.join(str(error).split())[:200]}"
    return None


if __name__ == "__main__":
    importlib.import_module("pyops.ops")
    go_through(cases(sys.argv[1]), problem, int(sys.argv[2]))
