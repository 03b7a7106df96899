"""Compiles for sm_90, without a GPU, exactly what a launcher would launch, and reads in the machine
code what came out.

Arguments are recorded, not guessed, and specialised as Triton does at run time: an integer of 1 is
a constant, and what is divisible by 16 is known to be.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

__all__ = ["Compiled", "Machine", "compile_launches", "machine_code", "variants"]

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS, THREADS, CTAS, SHARED = 65536, 2048, 32, 227 << 10  # of a multiprocessor of sm_90


@dataclass(frozen=True)
class Compiled:
    """One launch: the kernel, what it was given, and what the compiler made of it."""

    kernel: str
    arguments: dict[str, Any]
    grid: int
    warps: int
    shared: int
    ptx: str
    cubin: bytes


Launch = tuple[JITFunction, dict[str, Any], tuple[int, ...]]


def compile_launches(
    call: Callable[[], object], *, leave_out: Collection[str] = ()
) -> list[Compiled]:
    """Run `call` with every Triton launch recorded in place of run, and compile each for sm_90 but
    those of kernels whose names `leave_out` has.

    Tensors may be on the CPU or have no memory at all ("meta"): only their dtypes and addresses are
    looked at.
    """
    return [
        _compiled(*launch) for launch in _launches(call) if launch[0].fn.__name__ not in leave_out
    ]


def variants(call: Callable[[], object]) -> set[str]:
    """What Triton would compile for the launches of `call`: one text for each kernel of its own."""
    found = set()
    for kernel, arguments, _ in _launches(call):
        options, signature, constants, divisible = _specialised(kernel, arguments)
        texts = (kernel.fn.__name__, options, signature, constants, sorted(divisible))
        found.add(repr(texts))
    return found


def _launches(call: Callable[[], object]) -> list[Launch]:
    launched: list[Launch] = []

    def record(
        self: JITFunction, *args: object, grid: tuple[int, ...], warmup: bool, **kwargs: object
    ) -> None:
        launched.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs, grid))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return launched


def _specialised(
    kernel: JITFunction, arguments: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Options of the compiler, types, constants, and which arguments are known to be divisible by
    16, all by the rules of a launch; takes the options out of `arguments`."""
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    general = {p.name for p in kernel.params if p.do_not_specialize}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    fixed |= {name for name, value in arguments.items() if value is None}
    fixed |= {
        name
        for name, value in arguments.items()
        if type(value) is int and value == 1 and name not in general
    }
    signature = {
        name: "constexpr" if name in fixed else mangle_type(arguments[name])
        for name in kernel.arg_names
    }
    constants = {(kernel.arg_names.index(name),): arguments[name] for name in fixed}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in fixed | general and _by_16(arguments[name])
    }
    return options, signature, dict(sorted(constants.items())), divisible


def _compiled(kernel: JITFunction, arguments: dict[str, Any], grid: tuple[int, ...]) -> Compiled:
    options, signature, constants, divisible = _specialised(kernel, arguments)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    programs = 1
    for extent in grid:
        programs *= extent
    return Compiled(
        kernel.fn.__name__,
        arguments,
        programs,
        made.metadata.num_warps,
        made.metadata.shared,
        made.asm["ptx"],
        made.asm["cubin"],
    )


def _by_16(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "meta" or value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


@dataclass(frozen=True)
class Machine:
    """What a kernel's machine code holds; bytes and instructions are a thread's.

    loads, stores: widths in bytes of global accesses and how many there are of each, widest first.
    ahead: bytes asked for before the first of them is needed, the most there is along the code.
    loop: instructions of the longest loop that loads, or of the whole kernel.
    """

    name: str
    registers: int
    local: int
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]
    ahead: int
    loop: int

    @property
    def width(self) -> float:
        """Bytes of a global access, on average over those in the code."""
        accesses = [*self.loads.items(), *self.stores.items()]
        return sum(size * n for size, n in accesses) / max(sum(n for _, n in accesses), 1)

    def ctas(self, threads: int, shared: int = 0) -> int:
        """How many CTAs of `threads` are on a multiprocessor at a time; registers are dealt out by
        256 to a warp."""
        warps = threads // 32
        of_registers = REGISTERS // (-(-self.registers * 32 // 256) * 256) // warps
        of_shared = SHARED // max(
            shared + self.shared, 1
        )  # self.shared has in it the 1 KiB that the system takes for each CTA
        return min(CTAS, THREADS // threads, of_registers, of_shared)


def machine_code(cubin: bytes) -> list[Machine]:
    """Every kernel of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (_run("cuobjdump", flag, file.name) for flag in ("-res-usage", "-sass"))
    used = {}
    for name, text in re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", usage):
        used[name] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    return [_machine(name, used[name], lines) for name, lines in _functions(code) if name in used]


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run(
        [str(TOOLS / tool), *arguments], check=True, capture_output=True, text=True
    ).stdout


def _functions(code: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Name, and (address, instruction) in order."""
    for part in code.split("Function : ")[1:]:
        name = part.split("\n", 1)[0].strip()
        found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", part, flags=re.MULTILINE)
        yield name, [(int(address, 16), text) for address, text in found]


def _machine(name: str, used: dict[str, int], code: list[tuple[int, str]]) -> Machine:
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    for _, text in code:
        for kind, found in (("LDG", loads), ("LDGSTS", loads), ("STG", stores)):
            if (width := _width(text, kind)) is not None:
                found[width] = found.get(width, 0) + 1
    loads, stores = (dict(sorted(found.items(), reverse=True)) for found in (loads, stores))
    local = used.get("STACK", 0) + used.get("LOCAL", 0)
    return Machine(
        name, used["REG"], local, used.get("SHARED", 0), loads, stores, _ahead(code), _loop(code)
    )


def _width(text: str, kind: str) -> int | None:
    """Bytes that an instruction moves if it is a global access of this kind."""
    opcode = text.split()[1] if text.startswith("@") else text.split()[0]
    if opcode.split(".")[0] != kind:
        return None
    bits = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
    return int(bits.group(1)) // 8 if bits else 4


def _ahead(code: list[tuple[int, str]]) -> int:
    """Most bytes of loads whose registers nobody has touched yet, and of copies to shared memory
    that nobody has waited for; branches not followed."""
    waiting: dict[int, int] = {}  # first register -> bytes
    copies = most = 0
    for _, text in code:
        if "DEPBAR.LE" in text:
            copies = 0
        copies += _width(text, "LDGSTS") or 0
        named = [int(r) for r in re.findall(r"\bR(\d+)", text)]
        for first in [
            f for f, size in waiting.items() if any(f <= r < f + max(size // 4, 1) for r in named)
        ]:
            del waiting[first]
        width = _width(text, "LDG")
        if width is not None and named:
            waiting[named[0]] = width
        most = max(most, sum(waiting.values()) + copies)
    return most


def _loop(code: list[tuple[int, str]]) -> int:
    """Instructions of the longest backward branch's span that holds a load; all but padding where
    there is none."""
    longest = 0
    for address, text in code:
        target = re.search(r"\bBRA\S*\s+(?:\S+,\s*)?`?\(?\.?(?:L_x_\d+|0x([0-9a-f]+))", text)
        if target and target.group(1) and int(target.group(1), 16) < address:
            span = [t for at, t in code if int(target.group(1), 16) <= at <= address]
            if any(_width(t, kind) is not None for t in span for kind in ("LDG", "LDGSTS")):
                longest = max(longest, len(span))
    return longest or sum(not text.startswith(("NOP", "BRA")) for _, text in code)
