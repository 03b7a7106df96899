"""Compiles for sm_90, without a GPU, exactly what a launcher would launch: its arguments are recorded, not guessed."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

__all__ = ["compile_launches"]

OPTIONS = ("num_warps", "num_stages", "maxnreg")


def compile_launches(call: Callable[[], object]) -> list[str]:
    """Run `call` with every Triton launch recorded in place of run, compile each for sm_90, and return their PTX.

    Tensors may be on the CPU: only their dtypes are looked at.
    """
    launched = []

    def record(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        launched.append((self, args, kwargs))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return [_ptx(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs) for kernel, args, kwargs in launched]


def _ptx(kernel: JITFunction, arguments: dict[str, object]) -> str:
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    fixed = {p.name for p in kernel.params if p.is_constexpr} | {name for name, value in arguments.items() if value is None}
    signature = {name: "constexpr" if name in fixed else mangle_type(arguments[name]) for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): arguments[name] for name in fixed}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
