"""Libraries of kernels for the host are compiled once for the same sources, flags and compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda import host_library

pytestmark = pytest.mark.cpu_only


def test_a_library_is_made_again_for_other_flags_or_sources(tmp_path: Path, monkeypatch):
    source, kernels = tmp_path / "seven.cpp", tmp_path / "csrc"
    source.write_text('extern "C" int seven() { return NUMBER; }\n')
    kernels.mkdir()
    made: list[str] = []
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")

    def compile_source(flag: str, *arguments: object) -> None:
        made.append(flag)
        target = str(arguments[arguments.index("-o") + 1])
        subprocess.run([compiler, flag, "-shared", "-fPIC", source, "-o", target], check=True)

    monkeypatch.setattr(host_library, "compile_with", compile_source)
    monkeypatch.setattr(host_library, "ROOT", tmp_path)
    monkeypatch.setattr(host_library, "FOLDERS", ("csrc",))
    out = tmp_path / "out"

    def number(flag: str) -> int:
        return host_library.load([source], flag, out=out).seven()

    assert [number("-DNUMBER=7"), number("-DNUMBER=7"), len(made)] == [7, 7, 1]
    assert [number("-DNUMBER=8"), len(made)] == [8, 2]
    (kernels / "kernel.cuh").write_text("// changed")
    assert [number("-DNUMBER=8"), len(made)] == [8, 3]
    assert len(list(out.glob("*.so"))) == 1, "older libraries are removed"
