"""What the build promises: no torch in setup.py, plain words for what is missing, an install without kernels, a stable ABI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyops.ops import library

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parent.parent
TRY_SETUP = """
import importlib.util, runpy, sys
sys.argv = ["setup.py", "--version"]
{prepare}
setup = runpy.run_path("setup.py", run_name="setup")
assert "torch" not in sys.modules, "setup.py imported torch"
{then}
"""


def run_setup(prepare: str = "", then: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    code = TRY_SETUP.format(prepare=prepare, then=then)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def one_paragraph(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_setup_finds_torch_without_importing_it():
    done = run_setup(then="folder, number = setup['find_torch'](); assert (folder / 'version.py').exists(); print(number)\n"
                          "assert 'torch' not in sys.modules")  # fmt: skip
    assert done.returncode == 0, done.stderr
    import torch

    assert done.stdout.split()[-1] == torch.__version__
    import pyops

    assert done.stdout.split()[0] == pyops.__version__


@pytest.mark.parametrize(("missing", "words"), [("torch", "pip install torch"), ("pybind11", "pip install pybind11")])
def test_a_missing_package_is_named_with_its_fix(missing: str, words: str):
    hide = "find = importlib.util.find_spec\n"
    hide += f"importlib.util.find_spec = lambda n, *a: None if n == {missing!r} else find(n, *a)"
    message = one_paragraph(run_setup(hide, "from pathlib import Path\nsetup['run_cmake'](Path('nowhere'))"))
    assert words in message


def test_no_compiler_points_to_the_way_without():
    empty = "import shutil\nshutil.which = lambda *a, **k: None"
    message = one_paragraph(run_setup(empty, "setup['find_compiler']()"))
    assert "PYOPS_NO_EXT=1" in message
    assert "g++" in message
    assert "cmake" in one_paragraph(run_setup(empty, "from pathlib import Path\nsetup['run_cmake'](Path('nowhere'))"))


def test_cuda_is_chosen_by_what_is_installed(tmp_path: Path):
    """AUTO: nvcc and a CUDA build of torch, nothing else; ON without nvcc is an error; an unknown word is named."""
    nvcc = tmp_path / "nvcc"
    nvcc.touch(mode=0o755)
    (tmp_path / "cuda_torch" / "lib").mkdir(parents=True)
    (tmp_path / "cuda_torch" / "lib" / "libtorch_cuda.so").touch()
    ask = "from pathlib import Path\nprint(setup['wants_cuda'](Path({!r})))"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for torch_folder, choice, expected in (("cuda_torch", "AUTO", "True"), ("cpu_torch", "AUTO", "False"),
                                           ("cpu_torch", "ON", "True"), ("cuda_torch", "OFF", "False")):  # fmt: skip
        done = run_setup(then=ask.format(str(tmp_path / torch_folder)), PYOPS_CUDA=choice, PATH=path)
        assert done.stdout.split()[-1] == expected, done.stderr
    hidden = "import shutil\nshutil.which = lambda *a, **k: None"
    assert "nvcc is not on PATH" in one_paragraph(run_setup(hidden, ask.format(str(tmp_path)), PYOPS_CUDA="ON"))
    assert "PYOPS_CUDA=MAYBE" in one_paragraph(run_setup(then=ask.format(str(tmp_path)), PYOPS_CUDA="MAYBE"))


@pytest.mark.slow
def test_install_without_kernels(tmp_path: Path):
    """A wheel built with PYOPS_NO_EXT=1 holds no binary, imports, and steps in plain torch."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "pyops", copy / "pyops", ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"))
    target = tmp_path / "target"
    environment = {**os.environ, "PYOPS_NO_EXT": "1"}
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = subprocess.run([*install, str(copy)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))
    assert json.loads((target / "pyops" / "_build.json").read_text())["extension"] is False
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pyops, torch; from pyops.ops import reduce\n"
        "assert pyops.__file__.startswith(sys.argv[1]); assert not pyops.has_kernel('sum_rows_', 'cpu')\n"
        "out = torch.zeros(2); reduce.sum_rows_(out, [torch.ones(2)] * 3); assert out.tolist() == [3.0, 3.0]\n"
    )
    environment.pop("PYOPS_NO_EXT")
    subprocess.run([sys.executable, "-c", program, str(target)], cwd=tmp_path, env=environment, check=True, timeout=60)


@pytest.mark.slow
def test_an_unbuilt_tree_says_how_to_build(tmp_path: Path):
    shutil.copytree(ROOT / "pyops", tmp_path / "pyops", ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"))
    environment = {k: v for k, v in os.environ.items() if k != "PYOPS_NO_EXT"}
    done = subprocess.run([sys.executable, "-c", "import pyops; pyops.ops"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "ImportError: pyops is not built." in done.stderr
    assert "pip install --no-build-isolation" in done.stderr


def test_importing_pyops_is_light():
    program = "import sys, pyops; assert 'torch' not in sys.modules; pyops.__version__"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


needs_kernels = pytest.mark.skipif(not library.build_info()["extension"], reason="installed without kernels")


@needs_kernels
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_ops_use_nothing_of_torch_but_its_stable_abi():
    names = subprocess.run(
        ["nm", "-D", "--undefined-only", str(ROOT / "pyops" / "_C.so")], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1] for line in names.splitlines()]
    assert any(s.startswith("aoti_torch_") for s in symbols)
    foreign = [s for s in symbols if "c10" in s or "2at" in s or "5torch" in s or s.startswith("Py")]
    assert not foreign, foreign


@needs_kernels
@pytest.mark.slow
def test_an_instruction_set_can_be_forced():
    program = "from pyops.ops import library; print(library.isa())"
    for name in library.isas()[:1]:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYOPS_CPU_ISA": name},
                              capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
        assert done.stdout.split() == [name]
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYOPS_CPU_ISA": "sse9"},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "ImportError: PYOPS_CPU_ISA=sse9 is not among" in done.stderr
