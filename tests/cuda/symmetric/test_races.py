"""The kernel over symmetric memory under ThreadSanitizer: nothing to report as it is, and a report
for every fence, barrier or meeting that is taken out.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda.host_library import EMULATION as RUNTIME
from tests.cuda.host_library import ROOT, compile_with
from tests.cuda.symmetric.conftest import AT_ONCE, EMULATION
from tests.grids import full

pytestmark = pytest.mark.cpu_only

MEETING, KERNEL, SCOPE = "symmetric_meeting.cuh", "symmetric_kernel.cuh", "system_scope.cuh"
STEP = "symmetric_step.cuh"

# What is taken out of which file, and what stands there then.
WITHOUT = {
    "release": (SCOPE, "__ATOMIC_RELEASE", "__ATOMIC_RELAXED"),
    "acquire": (
        SCOPE,
        "return __atomic_load_n(word, __ATOMIC_ACQUIRE)",
        "return __atomic_load_n(word, __ATOMIC_RELAXED)",
    ),
    "barrier before the word": (MEETING, "    __syncthreads();  // what any", "    // what any"),
    "barrier after the wait": (MEETING, "return !__syncthreads_or(lost)", "return !lost"),
    "wait": (MEETING, "lost = !wait_for(peers, peer, when)", "lost = false"),
    "first meeting": (KERNEL, "if (!meet(a.peers, epoch + 1))", "if (false)"),
    "second meeting": (KERNEL, "if (!meet(a.peers, epoch + 2))", "if (false)"),
    "second meeting's own epoch": (
        KERNEL,
        "if (!meet(a.peers, epoch + 2))",
        "if (!meet(a.peers, epoch + 1))",
    ),
    "step's first meeting": (STEP, "if (!meet(a.peers, epoch + 1)) return;", ""),
    "step's second meeting": (STEP, "if (!meet(a.peers, epoch + 2)) return;", ""),
    "barrier before the step's row": (
        STEP,
        "            __syncthreads();\n            if (threadIdx.x == 0) row.enter",
        "            if (threadIdx.x == 0) row.enter",
    ),
    "barrier after the step's row": (
        STEP,
        "row.enter(a.step, r);\n            __syncthreads();",
        "row.enter(a.step, r);",
    ),
    "fence of the last CTA": ("reduce.cuh", "        if (last) __threadfence();\n", ""),
}


def report(folder: Path, *which: str) -> str:
    """What ThreadSanitizer says of the tree in `folder`; skips where it can't run."""
    runtime, race, program = folder / "runtime.o", folder / "race.o", folder / "race"
    compile_with(AT_ONCE, "-O1", "-g", "-DPYOPS_TSAN", "-c", RUNTIME / "runtime.cpp", "-o", runtime)
    source = EMULATION / "race.cpp"
    compile_with(AT_ONCE, "-O1", "-g", "-fsanitize=thread", f"-I{folder}", "-c", source, "-o", race)
    compile_with("-fsanitize=thread", race, runtime, "-o", program, "-lpthread")
    if shutil.which("setarch") is None:
        pytest.skip("no setarch: ThreadSanitizer needs addresses that are not random")
    ran = subprocess.run(
        ["setarch", "-R", program, *which], capture_output=True, text=True, timeout=600, check=False
    )
    if "FATAL" in ran.stderr:
        pytest.skip(f"ThreadSanitizer does not run here: {ran.stderr[:200]}")
    assert "done" in ran.stdout or "ThreadSanitizer" in ran.stderr, ran.stderr[-2000:]
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(
    "without", [full(None, id="nothing"), *(full(name, id=name) for name in WITHOUT)]
)
def test_races(without: str | None, tmp_path: Path) -> None:
    for name in ("cuda", "math"):
        shutil.copytree(ROOT / "csrc" / name, tmp_path / "csrc" / name)
    if without is not None:
        name, old, new = WITHOUT[without]
        (path,) = (tmp_path / "csrc" / "cuda").rglob(name)
        text = path.read_text()
        assert old in text, f"{name} has changed"
        path.write_text(text.replace(old, new))
    found = report(tmp_path, *(["step"] if without is not None and "step" in without else []))
    found += report(tmp_path, "step") if without is None else ""
    # A row that is read too early may also end in a division by its zeros.
    assert ("ThreadSanitizer" in found) == (without is not None), found[-4000:]
