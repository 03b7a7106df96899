"""What the compiler made of every Triton and CUDA kernel for sm_90: registers, occupancy, widths of
accesses. Needs no GPU.

python -m benchmarks.ops.machine_code.kernel_facts [NAME...]

NAME is a stem of pyops/ops/triton or csrc/cuda; without one, all of them.

warps           of a CTA
registers       of a thread; `local` are bytes of it that lie in local memory instead: spills
shared          bytes of a CTA
CTAs            that a multiprocessor holds at a time
loads, stores   widths of global accesses in bytes, and how many of each stand in the code
ahead           KiB that a multiprocessor has asked for before it needs the first of them; 33 keep
                4.3 TB/s going at 1 us
issue           instructions per element, of the loop where there is one; B, FLOP: bytes and
                operations per element
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.ops.machine_code.ahead import Compiled, Machine, compile_launches, machine_code
from benchmarks.ops.machine_code.triton_cases import TRITON, WITH_PRODUCTS, Case, short_name

__all__ = ["CUDA", "Fact", "elements", "main", "triton_facts"]

ROOT = Path(__file__).resolve().parents[3]
CUDA = {path.stem: path for path in sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))}
COLUMNS = {
    "warps": 5,
    "registers": 9,
    "local": 5,
    "shared": 6,
    "CTAs": 4,
    "loads": 18,
    "stores": 14,
    "ahead": 6,
}
HEAD = " ".join([f"{'kernel':<54}", *(f"{name:>{width}}" for name, width in COLUMNS.items())])


def elements(launch: Compiled) -> int:
    """Elements that a program works on at a time: what its tile constants say."""
    a = launch.arguments
    return {
        "_rows_forward": lambda: a["ROWS"] * a["BLOCK"] * a["CHUNKS"],
        "_rows_backward": lambda: a["ROWS"] * a["BLOCK"] * a["CHUNKS"],
        "_combine": lambda: 4 * a["BLOCKS"],
        "_statistics": lambda: a["LANES"] * a["GROUP"],
        "_rotary": lambda: a["HEADS"] * 2 * a["PAIRS"],
        "_sum_products": lambda: a["ROWS"] * a["WIDTH"],
        "_product": lambda: a["OUTPUTS"] * a["UNITS"] * a["UNIT"],  # bytes of codes
    }.get(
        launch.kernel,
        lambda: a.get("ROWS", a.get("M", 1)) * a.get("COLUMNS", a.get("BLOCK", a.get("N", 1))),
    )()


def line(name: str, machine: Machine, warps: int, dynamic: int = 0) -> str:
    ctas = machine.ctas(32 * warps, dynamic)
    loads, stores = (
        " ".join(f"{size}x{n}" for size, n in found.items())
        for found in (machine.loads, machine.stores)
    )
    ahead = round(machine.ahead * 32 * warps * ctas / 1024)
    facts = (
        warps,
        machine.registers,
        machine.local,
        machine.shared + dynamic,
        ctas,
        loads,
        stores,
        ahead,
    )
    return " ".join(
        [
            f"{name:<54}",
            *(f"{fact:>{width}}" for fact, width in zip(facts, COLUMNS.values(), strict=True)),
        ]
    )


class Fact(NamedTuple):
    """A launch of a case. `issue`: instructions of a program, or of a turn of its loop, over its
    elements."""

    name: str
    case: Case
    machine: Machine
    warps: int
    shared: int
    grid: int
    issue: float


def triton_facts(stem: str, only: Collection[str] | None = None) -> Iterator[Fact]:
    """Of every launch of every case, or of those with these names; the sum that many cases end with
    once."""
    seen = set()
    for case in (TRITON | WITH_PRODUCTS)[stem]():
        if only is not None and case.name not in only:
            continue
        for launch in compile_launches(case.call):
            name = f"{case.name}: {launch.kernel.lstrip('_')}"
            if launch.kernel == "_column_sum":
                name = f"any {short_name(launch.arguments['out'].dtype)}: column_sum"
            if name in seen:
                continue
            seen.add(name)
            (machine,) = machine_code(launch.cubin)
            issue = machine.loop * 32 * launch.warps / elements(launch)
            yield Fact(name, case, machine, launch.warps, launch.shared, launch.grid, issue)


def of_triton(stem: str) -> None:
    """A line for every launch."""
    print(f"\n{stem} (Triton)\n{HEAD} {'issue':>6} {'B':>4} {'FLOP':>4}")
    for fact in triton_facts(stem):
        text = line(fact.name, fact.machine, fact.warps, fact.shared) + f" {fact.issue:>6.1f}"
        if not fact.name.startswith("any "):
            text += f" {fact.case.bytes:>4.3g} {fact.case.flops:>4}"
        print(text)


def cubin_of(stem: str, nvcc: str, folder: Path) -> bytes:
    """Compiled as .ci/compile_cuda.sh does."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    include, out = Path(spec.origin).parent / "include", folder / f"{stem}.cubin"
    exact = re.search(
        rf"{CUDA[stem].relative_to(ROOT)} [^\n]*-fmad=false", (ROOT / "CMakeLists.txt").read_text()
    )
    options = [
        "-std=c++17",
        "-O3",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        "-DUSE_CUDA=1",
        "-isystem",
        str(include),
    ]
    subprocess.run(
        [
            nvcc,
            *options,
            *(["-fmad=false"] if exact else []),
            "-arch=sm_90",
            "-cubin",
            "-o",
            str(out),
            str(CUDA[stem]),
        ],
        check=True,
    )
    return out.read_bytes()


def _readable(name: str) -> str:
    """`step_kernel<Adam, false>`."""
    text = subprocess.run(
        ["c++filt", name], check=True, capture_output=True, text=True
    ).stdout.strip()
    for pattern, short in (
        (r"pyops::cuda::|pyops::|\(anonymous namespace\)::", ""),
        (r"^void ", ""),
        (r"\(int\)|\(bool\)", ""),
    ):
        text = re.sub(pattern, short, text)
    return text.split("(")[0]


def of_cuda(stem: str) -> None:
    """A line for every kernel; all are launched with 256 threads."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print(f"\n{stem} (CUDA): no nvcc on this machine: skipped")
        return
    print(f"\n{stem} (CUDA)\n{HEAD}")
    with tempfile.TemporaryDirectory() as folder:
        for machine in machine_code(cubin_of(stem, nvcc, Path(folder))):
            print(line(_readable(machine.name), machine, 8))


def main() -> int:
    known = [*TRITON, *WITH_PRODUCTS, *CUDA]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ops.machine_code.kernel_facts",
        description="What the compiler made of the kernels.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(known)}; all when none is given",
    )
    names = parser.parse_args().names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no kernels called {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        (of_cuda if name in CUDA else of_triton)(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
