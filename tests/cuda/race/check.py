"""Every C++ CUDA kernel on the host under ThreadSanitizer, AddressSanitizer and
UndefinedBehaviorSanitizer, and a look at whether each barrier and each fence would be missed.

python -m tests.cuda.race.check [tsan] [mutants] [asan] [FAMILY...] [FILE.cuh:LINE...]

All three checks, all families and all places when none is named: a part takes as long as its
families, `make race RACE="tsan asan codecs"` say, or one mutant, RACE="mutants reduce.cuh:44 norm".

tsan      each CUDA thread a fiber with a vector clock of its own (emulation/runtime.cpp): 0
          reports but those of EXPLAINED
mutants   the same with one barrier or fence that orders nothing, for each that stands in the
          kernels: it must be reported, or be one of REDUNDANT
asan      tensors of exactly their size, at aligned and odd addresses; and undefined behaviour

The kernels in which ranks meet have a program of their own, symmetric/emulation/race.cpp, whose
ranks and CTAs run at once.

Needs g++ and no GPU. What it can't see: the order of one warp's own lanes, which run in lockstep in
the emulation's votes and shuffles, and what the hardware does beyond CUDA's memory model.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
KERNELS = ROOT / "csrc" / "cuda"
EMULATION = HERE.parent / "emulation"
MEETING = HERE.parent / "symmetric" / "emulation" / "race.cpp"

# From cheap to dear: a mutant is tried on one after the other until it is reported.
FAMILIES = ("norm", "sum", "random", "adafactor", "layers", "codecs", "step")
# A null pointer is for AddressSanitizer: GCC asks whether threadIdx lies at null by the flags of
# the addition that gives its address, which ld turns into a lea, which sets none.
WITHOUT_NULL = "-fno-sanitize=null"
# Of the program in which ranks meet: the argument that it takes for each.
MEETINGS: dict[str, tuple[str, ...]] = {"symmetric": (), "symmetric_step": ("step",)}
CHECKS = ("tsan", "mutants", "asan")
FLAGS = ("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wno-unknown-pragmas")
EXPLAINED = {"raise_flag": "several warps write the same value"}
# Barriers that order nothing that any kernel relies on today, by the text of their line.
REDUNDANT = {
    "__syncthreads();  // the row before has been read": (
        "block_sum, at the end of every slice, waits for all threads after their last look at it"
    ),
    "__syncthreads();  // what other threads than the first wrote is to be seen, too": (
        "in every kernel of today the first thread alone touches what another CTA touches"
    ),
}


class Program:
    """The cases of one source, with the kernels compiled under some sanitizers.

    Args:
        folder: Where it is made.
        sanitizers: For -fsanitize; "" for none.
        at_once: Whether it is the program in which ranks meet.
    """

    def __init__(self, folder: Path, sanitizers: str, *, at_once: bool) -> None:
        label = f"{'symmetric' if at_once else 'cases'}-{sanitizers.split(',')[0]}"
        self._path = folder / label
        sources = [EMULATION / "runtime.cpp"]
        if at_once:
            sources.append(MEETING)
        else:
            sources += [EMULATION / "kernels.cpp", EMULATION / "codecs.cpp", HERE / "cases.cpp"]

        sanitized = [f"-fsanitize={sanitizers}"] if sanitizers else []

        def compiled(source: Path) -> Path:
            out = folder / f"{source.stem}-{label}.o"
            instrumented = list(sanitized)
            instrumented += [WITHOUT_NULL] if "undefined" in sanitizers else []
            if source.stem == "runtime":
                instrumented = ["-DPYOPS_TSAN"] if sanitizers == "thread" else []
            command = [os.environ.get("CXX", "g++"), *FLAGS, *instrumented]
            command += ["-DPYOPS_AT_ONCE"] if at_once else []
            command += [f"-I{EMULATION}", f"-I{ROOT}", "-c", str(source), "-o", str(out)]
            subprocess.run(command, check=True)
            return out

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        link = [os.environ.get("CXX", "g++"), *sanitized, *map(str, objects)]
        subprocess.run([*link, "-o", str(self._path), "-lpthread"], check=True)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            # ThreadSanitizer's shadow wants its addresses.
            ["setarch", "-R", str(self._path), *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            errors="replace",
        )


class Families:
    """The chosen families of kernels and the programs that call them."""

    def __init__(self, folder: Path, sanitizers: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._calls: dict[str, tuple[Program, tuple[str, ...]]] = {}
        if calls := [name for name in names if name in FAMILIES]:
            alone = Program(folder, sanitizers, at_once=False)
            self._calls |= {name: (alone, (name,)) for name in calls}
        if calls := [name for name in names if name in MEETINGS]:
            together = Program(folder, sanitizers, at_once=True)
            self._calls |= {name: (together, MEETINGS[name]) for name in calls}

    def run(self, family: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program, arguments = self._calls[family]
        return program.run(*arguments, **environment)


def reports(text: str) -> list[str]:
    """Where in the kernels the accesses of each report of a data race stand."""
    found = []
    for report in text.split("WARNING: ThreadSanitizer")[1:]:
        places = re.findall(r"(\w+\.cuh:\d+)", report)
        found.append(" and ".join(dict.fromkeys(places[:2])) or report.strip().splitlines()[0])
    return found


def sites() -> dict[str, str]:
    """`file:line` of every barrier and fence in the kernels, and the line's text."""
    found = {}
    for path in sorted(KERNELS.rglob("*.cuh")):
        for number, text in enumerate(path.read_text().splitlines(), start=1):
            if re.search(r"__(syncthreads(_or)?|threadfence)\(", text.split("//")[0]):
                found[f"{path.name}:{number}"] = text.strip()
    return found


def tsan_options(folder: Path, *, stop: bool) -> str:
    suppressions = folder / "explained"
    suppressions.write_text("".join(f"race_top:{name}\n" for name in EXPLAINED))
    return f"suppressions={suppressions} halt_on_error={int(stop)} report_thread_leaks=0"


def met_in(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The barriers and fences that a run with COVERED came to."""
    return set(re.findall(r"^met (\S+)", done.stdout, re.MULTILINE))


def check_races(families: Families, folder: Path) -> tuple[list[str], dict[str, set[str]]]:
    """What is wrong, and which barriers and fences each family meets."""
    wrong, met = [], {}
    for family in families.names:
        begin = time.monotonic()
        done = families.run(family, TSAN_OPTIONS=tsan_options(folder, stop=False), COVERED="1")
        met[family] = met_in(done)
        found = sorted(set(reports(done.stderr)))
        if "done" not in done.stdout:
            found.append(f"it ended with {done.returncode}: {done.stderr[-500:]}")
        wrong += [f"tsan, {family}: {each}" for each in found]
        print(f"tsan     {family:<14} {len(found)} findings {time.monotonic() - begin:6.1f} s")
    return wrong, met


def check_mutants(
    families: Families, folder: Path, met: dict[str, set[str]], places: Collection[str]
) -> list[str]:
    wrong, options = [], tsan_options(folder, stop=True)
    first = families.names[0]
    if reports(families.run(first, TSAN_OPTIONS=options, WITHOUT="nothing.cuh:1").stderr):
        wrong.append("mutant, none: something was reported with nothing taken out")
    for site, text in sites().items():
        if site not in places:
            continue
        begin, seen = time.monotonic(), ""
        for family in (f for f in families.names if site in met[f]):
            if found := reports(families.run(family, TSAN_OPTIONS=options, WITHOUT=site).stderr):
                seen = f"{family}: {found[0]}"
                break
        if not seen and text in REDUNDANT:
            seen = f"not reported, rightly: {REDUNDANT[text]}"
        elif not seen:
            wrong.append(f"mutant, {site} ({text}): nothing was reported without it")
        print(f"without  {site:<22} {seen or 'NOT REPORTED'} {time.monotonic() - begin:6.1f} s")
    return wrong


def check_addresses(families: Families) -> list[str]:
    wrong = []
    for family in families.names:
        begin = time.monotonic()
        done = families.run(
            family,
            ASAN_OPTIONS="detect_stack_use_after_return=0 detect_leaks=0",
            UBSAN_OPTIONS="print_stacktrace=1 halt_on_error=1",
        )
        good = done.returncode == 0 and "done" in done.stdout and "runtime error" not in done.stderr
        if not good:
            wrong.append(f"asan, {family}: {done.stderr[:2000]}")
        print(
            f"asan     {family:<14} {0 if good else 1} findings {time.monotonic() - begin:6.1f} s"
        )
    return wrong


def chosen_of(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Checks, families and places for mutants; all of a kind of which none is named.

    Raises:
        ValueError: A word is none of them.
    """
    kinds = (CHECKS, (*FAMILIES, *MEETINGS), tuple(sites()))
    if unknown := [word for word in words if not any(word in kind for kind in kinds)]:
        raise ValueError(
            f"{', '.join(unknown)}: no check ({', '.join(kinds[0])}), no family "
            f"({', '.join(kinds[1])}), and no place with a barrier or fence in csrc/cuda"
        )
    checks, families, places = ([w for w in kind if w in words] or list(kind) for kind in kinds)
    return checks, families, places


def main(words: Sequence[str]) -> int:
    try:
        checks, names, places = chosen_of(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    wrong, everything = [], set(names) == {*FAMILIES, *MEETINGS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        met: dict[str, set[str]] = {}
        if {"tsan", "mutants"} & set(checks):
            families = Families(folder, "thread", names)
        if "tsan" in checks:
            found, met = check_races(families, folder)
            wrong += found
        elif "mutants" in checks:
            plain = Families(folder, "", names)
            met = {family: met_in(plain.run(family, COVERED="1")) for family in names}
        reached: set[str] = set().union(*met.values())
        asked = everything or len(places) < len(sites())
        if met and asked and (unmet := sorted(set(places) - reached)):
            wrong.append(f"no case comes to {', '.join(unmet)}")
        if "mutants" in checks:
            wrong += check_mutants(families, folder, met, reached.intersection(places))
        if "asan" in checks:
            wrong += check_addresses(Families(folder, "address,undefined", names))
    print("\n".join(wrong) or "nothing found but what is explained")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
