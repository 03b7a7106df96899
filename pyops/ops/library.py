"""Loads the kernels and keeps the list of ops: the one place that says whether there is an
extension.

define(schema, reference, fake, ...)      pyops/ops/<stem>.py, at import
    |-- schema, fake, autograd: always
    |-- extension built:  C++ kernels answer for CPU and CUDA, Triton kernels (pyops/ops/triton) for
    |                     CUDA where triton is installed; for any other device the op raises and
    |                     says how to build, or its reference answers if it is `Everywhere`
    `-- PYOPS_NO_EXT=1:   the plain-torch reference answers for every device
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from pyops.ops.memory import VIEWS, check_kinds, check_memory, resolving
from pyops.torch_private import has_dispatch_kernel

__all__ = [
    "Everywhere",
    "build_info",
    "by_torch_on_cuda",
    "define",
    "has_kernel",
    "has_triton",
    "isa",
    "isas",
    "library",
    "load",
    "native",
    "no_second_derivative",
    "use_isa",
]

_PACKAGE = Path(__file__).resolve().parent.parent
_HOW_TO_BUILD = (
    "pip install -e . (or PYOPS_NO_EXT=1 pip install -e . for plain torch, without kernels)"
)


@functools.cache
def build_info() -> Mapping[str, Any]:
    """What was built: extension, torch, compiler, isas, cuda, cuda_architectures.

    The environment variable PYOPS_NO_EXT=1 chooses plain torch for one run.

    Raises:
        ImportError: when pyops was never built.
    """
    if os.environ.get("PYOPS_NO_EXT", "0") not in ("", "0"):
        return MappingProxyType({"extension": False, "cuda": False})
    try:
        info = json.loads((_PACKAGE / "_build.json").read_text())
    except FileNotFoundError:
        hidden = _hidden_installation()
        found = f"{hidden}In the folder that holds setup.py, run: {_HOW_TO_BUILD}"
        raise ImportError(f"pyops is not built in {_PACKAGE}. {found}") from None
    return MappingProxyType(info)


def _hidden_installation() -> str:
    """Words about an installed pyops that a checkout is found before, as in a Python that was
    started in one; "" for none."""
    for entry in sys.path:
        folder = Path(entry or ".").resolve() / "pyops"
        if folder != _PACKAGE and (folder / "_build.json").is_file():
            return (
                f"It is a checkout that hides the pyops installed in {folder}: to use "
                "that one, start Python in another folder "
                "or take the checkout off PYTHONPATH. To use the checkout, build it. "
            )
    return ""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Load pyops/_C.so, whose kernels register themselves. None when pyops was installed without
    kernels."""
    if not build_info()["extension"]:
        return None
    path = _PACKAGE / "_C.so"
    if not path.exists():
        raise ImportError(
            f"{path} is missing although pyops was built with kernels. "
            f"{_hidden_installation()}Build again: {_HOW_TO_BUILD}"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"pyops/_C.so was built against torch {build_info().get('torch')} and does "
            "not load in torch "
            f"{torch.__version__}: {error}. pyops needs torch 2.11 or newer; build "
            f"again: {_HOW_TO_BUILD}"
        ) from error
    handle = ctypes.CDLL(str(path))  # already loaded: the same library
    handle.pyops_cpu_isa.restype = ctypes.c_char_p
    handle.pyops_use_cpu_isa.argtypes = [ctypes.c_char_p]
    if (wanted := os.environ.get("PYOPS_CPU_ISA")) and handle.pyops_use_cpu_isa(
        wanted.encode()
    ) != 0:
        raise ImportError(
            f"PYOPS_CPU_ISA={wanted} is not among what this build and this machine have: "
            f"{isas(handle)}"
        )
    return handle


library = torch.library.Library("pyops", "DEF")


class Everywhere:
    """A reference that also answers for devices without a kernel, in an installation that has
    kernels; for `define`.

    Args:
        function: The reference, in plain torch.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    triton: str | None = None,
    keeps_addresses: bool = False,
    flops: Callable[..., int] | None = None,
) -> None:
    """Define the op of `schema`; `reference` is its plain-torch meaning, `fake` its effect on
    shapes.

    Args:
        backward, setup_context: its derivative, as torch.library.register_autograd takes them;
            none: it has no derivative.
        triton: the module in pyops/ops/triton that has a function of the op's name and arguments
            for CUDA tensors.
        keeps_addresses: whether what it returns points to its arguments, so that no copy can stand
            in for one.
        flops: its formula for torch.utils.flop_counter: of the shapes of its tensors and of its
            other arguments. None: 0, as torch counts whatever has no matrix product.
    """
    name = schema[: schema.index("(")]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"pyops::{name}", check_kinds(name, fake), lib=library)
    if backward is not None:
        torch.library.register_autograd(
            f"pyops::{name}", backward, setup_context=setup_context, lib=library
        )
    packet = getattr(torch.ops.pyops, name)
    register_flop_formula(packet)(_no_products if flops is None else flops)
    extension = build_info()["extension"]
    # This key answers for every device that has no kernel of its own.
    missing = extension and not isinstance(reference, Everywhere)
    other = _missing_kernel(name, triton) if missing else check_memory(name, reference)
    library.impl(name, other, "CompositeExplicitAutograd")
    for view in VIEWS:
        library.impl(
            name,
            resolving(packet.default, keeps_addresses=keeps_addresses),
            view,
        )
    if extension and triton is not None and has_triton():
        library.impl(name, _triton_kernel(triton, name), "CUDA")


def by_torch_on_cuda(name: str, function: Callable[..., Any]) -> None:
    """Let `function`, of the op's arguments, answer for CUDA tensors by torch's own kernels."""
    if build_info()["extension"]:
        library.impl(name, check_memory(name, function), "CUDA")


def _no_products(*_: Any, **__: Any) -> int:
    return 0


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed. Nothing is imported, and no driver is asked for."""
    return importlib.util.find_spec("triton") is not None


def _triton_kernel(stem: str, name: str) -> Callable[..., Any]:
    """The function `name` of pyops/ops/triton/<stem>.py, imported at its first call."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"pyops.ops.triton.{stem}"), name)(*args, **kwargs)

    return check_memory(name, launch)


def no_second_derivative(ctx: Any, *grads: Any) -> Any:
    """The derivative of a backward op: there is none, and silence would be a wrong number."""
    raise NotImplementedError(
        "this op has no second derivative; compute the first without create_graph=True"
    )


def _missing_kernel(name: str, triton: str | None = None) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        tensors = [
            t
            for a in args
            for t in (a if isinstance(a, list | tuple) else [a])
            if isinstance(t, torch.Tensor)
        ]
        if odd := next((t for t in tensors if t.layout != torch.strided), None):
            raise TypeError(
                f"pyops::{name} has no kernel for layout {odd.layout}; pass dense "
                "tensors (to_dense())"
            )
        device = tensors[0].device.type if tensors else "no"
        for_cuda = "build with PYOPS_CUDA=ON" if triton is None else "install triton"
        build = for_cuda if device == "cuda" else "move the tensors to cpu or cuda"
        raise RuntimeError(
            f"pyops::{name} has no kernel for {device} tensors in this installation; "
            f"{build}, or install with PYOPS_NO_EXT=1 "
            "for the plain-torch path. pyops.has_kernel(op, device) tells."
        )

    return refuse


def has_kernel(op: str, device: str) -> bool:
    """Whether `op` (such as "adam_") has a kernel, C++ or Triton, for `device` ("cpu", "cuda") in
    this installation.

    Args:
        op: Its name, such as "adam_".
        device: "cpu" or "cuda", with or without an index.
    """
    if not build_info()["extension"]:
        return False
    importlib.import_module("pyops.ops")
    name, key = op.removeprefix("pyops::"), {"cpu": "CPU", "cuda": "CUDA"}.get(device.split(":")[0])
    if not hasattr(torch.ops.pyops, name):
        raise ValueError(f"pyops has no op {op!r}; dir(torch.ops.pyops) lists them")
    return key is not None and has_dispatch_kernel(f"pyops::{name}", key)


@functools.cache
def native() -> ModuleType | None:
    """The pybind11 module `pyops._native`, or None when pyops was installed without kernels."""
    return importlib.import_module("pyops._native") if build_info()["extension"] else None


def isa() -> str:
    """The instruction set whose CPU kernels are in use: baseline, avx2 or avx512; "none" without
    kernels."""
    handle = load()
    return handle.pyops_cpu_isa().decode() if handle is not None else "none"


def isas(handle: ctypes.CDLL | None = None) -> list[str]:
    """The instruction sets that both this build and this machine have, slowest first."""
    handle = handle if handle is not None else load()
    if handle is None:
        return []
    return [name for name in build_info()["isas"] if handle.pyops_has_cpu_isa(name.encode())]


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run the block with the CPU kernels of another instruction set: for tests. Affects the whole
    process."""
    handle, before = load(), isa()
    if handle is None or handle.pyops_use_cpu_isa(name.encode()) != 0:
        raise ValueError(
            f"instruction set {name!r} is not among what this build and this machine have: {isas()}"
        )
    try:
        yield
    finally:
        handle.pyops_use_cpu_isa(before.encode())


load()
