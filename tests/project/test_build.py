"""What the build promises: no torch in setup.py, plain words for what is missing, an install
without kernels, a stable ABI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from pyops.ops import library
from tests.grids import full
from tests.project.forked_python import ForkedPython

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
BUILT = shutil.ignore_patterns("*.so", "_build.json")  # of pyops; byte code is that of its source
TRY_SETUP = """
import importlib.util, runpy, sys
sys.argv = ["setup.py", "--version"]
{prepare}
setup = runpy.run_path("setup.py", run_name="setup")
assert "torch" not in sys.modules, "setup.py imported torch"
{then}
"""


RunSetup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def with_torch() -> Iterator[ForkedPython]:
    """Interpreters that have imported torch, and nothing of pyops."""
    made = ForkedPython("torch")
    yield made
    made.close()


@pytest.fixture(scope="module")
def run_setup() -> Iterator[RunSetup]:
    """run_setup(prepare, then, **environment): setup.py between two programs, without torch."""
    without_torch = ForkedPython("setuptools", "runpy")

    def run(
        prepare: str = "", then: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        code = TRY_SETUP.format(prepare=prepare, then=then)
        return without_torch.run(code, cwd=ROOT, env={**os.environ, **environment})

    yield run
    without_torch.close()


def one_paragraph(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_setup_finds_torch_without_importing_it(run_setup: RunSetup):
    then = (
        "folder, number = setup['torch_to_build_against']()\nassert (folder / "
        "'version.py').exists()\nprint(number)\n"
    )
    done = run_setup(then=then + "assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr
    import torch

    assert done.stdout.split()[-1] == torch.__version__
    import pyops

    assert done.stdout.split()[0] == pyops.__version__


@pytest.mark.parametrize(
    ("missing", "words"), [("torch", "pip install torch"), full("pybind11", "pip install pybind11")]
)
def test_a_missing_package_is_named_with_its_fix(run_setup: RunSetup, missing: str, words: str):
    hide = "find = importlib.util.find_spec\n"
    hide += f"importlib.util.find_spec = lambda n, *a: None if n == {missing!r} else find(n, *a)\n"
    hide += "import build_backend\nbuild_backend._torch_of_target = lambda: None"
    message = one_paragraph(
        run_setup(hide, "from pathlib import Path\nsetup['run_cmake'](Path('nowhere'))")
    )
    assert words in message


@pytest.mark.full
def test_a_torch_that_is_too_old_is_called_that(run_setup: RunSetup, tmp_path: Path):
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    message = one_paragraph(
        run_setup("", "setup['torch_to_build_against']()", PYOPS_TORCH=str(tmp_path))
    )
    assert f"the torch in {tmp_path} is 2.9.1+cpu, and pyops needs torch 2.11 or newer" in message
    assert "pip install 'torch>=2.11'" in message


def in_isolation(tmp_path: Path, program: str, **environment: str) -> list[str]:
    """What `program` prints in an environment as pip makes it for a build: setuptools, and nothing
    of where pip runs."""
    overlay = tmp_path / "overlay"
    if not overlay.exists():
        overlay.mkdir()
        for name in ("setuptools", "_distutils_hack"):
            (overlay / name).symlink_to(Path(sysconfig.get_paths()["purelib"]) / name)
        (overlay / "sitecustomize.py").write_text(
            "import sys\nsys.path[:] = [entry for entry in sys.path if not "
            "entry.endswith('site-packages')]\n"
        )
    environment = {**os.environ, "PYTHONPATH": str(overlay), "PYTHONNOUSERSITE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_isolated_build_finds_the_torch_of_the_environment_it_is_for(tmp_path: Path):
    """None is fetched where there is one that will do; one is where there is none; none at all
    without kernels."""
    program = (
        "import build_backend as b, importlib.util\nassert importlib.util.find_spec('torch') "
        "is None\n{}"
    )
    asked = "print(b.find_torch())\nprint(b._torch_to_install())"
    import torch

    assert in_isolation(tmp_path, program.format(asked)) == [str(Path(torch.__file__).parent), "[]"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "version.py").write_text("__version__ = '2.9.1'")
    for hidden, more in (
        ("b._torch_of_target = lambda: None\n", {}),
        ("", {"PYOPS_TORCH": str(tmp_path / "old")}),
    ):
        told = in_isolation(tmp_path, program.format(hidden + asked), **more)
        assert told[1] == "['torch>=2.11']"
        assert (
            in_isolation(tmp_path, program.format(hidden + asked), **more, PYOPS_NO_EXT="1")[1]
            == "[]"
        )


@pytest.mark.full  # `make docs` runs it
@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="the files of the project are those that git knows"
)
def test_the_sdist_holds_every_file_of_the_project(tmp_path: Path):
    program = "import sys, build_backend; print(build_backend.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[-1]
    assert name == f"pyops_train-{version('pyops-train')}.tar.gz"
    with tarfile.open(tmp_path / name) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(tracked) - packed == set()
    assert not [file for file in packed if file.endswith((".so", ".pyc", "_build.json"))]


def test_no_compiler_points_to_the_way_without(run_setup: RunSetup):
    empty = "import shutil\nshutil.which = lambda *a, **k: None"
    message = one_paragraph(run_setup(empty, "setup['find_compiler']()"))
    assert "PYOPS_NO_EXT=1" in message
    assert "g++" in message
    assert "cmake" in one_paragraph(
        run_setup(empty, "from pathlib import Path\nsetup['run_cmake'](Path('nowhere'))")
    )


@pytest.mark.parametrize("prefix", ["/virtual", sys.base_prefix], ids=["virtual", "plain"])
def test_a_virtual_environment_builds_with_its_own_programs(
    run_setup: RunSetup, tmp_path: Path, prefix: str
):
    """Whatever PATH is: another ninja compiles all of a built checkout again."""
    for program in ("beside/ninja", "beside/other", "path/ninja", "path/nvcc"):
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).touch(mode=0o755)
    prepare = f"sys.executable, sys.prefix = {str(tmp_path / 'beside' / 'python')!r}, {prefix!r}"
    ask = "print(*(setup['find_program'](name) for name in ('ninja', 'other', 'nvcc')))"
    done = run_setup(prepare, ask, PATH=str(tmp_path / "path"))
    found = [str(Path(path).relative_to(tmp_path)) for path in done.stdout.split()[-3:]]
    first = "beside/ninja" if prefix == "/virtual" else "path/ninja"
    assert found == [first, "beside/other", "path/nvcc"], done.stderr


def test_cuda_is_chosen_by_what_is_installed(run_setup: RunSetup, tmp_path: Path):
    """AUTO: nvcc and a CUDA build of torch, nothing else; ON without nvcc is an error; an unknown
    word is named."""
    nvcc = tmp_path / "nvcc"
    nvcc.touch(mode=0o755)
    (tmp_path / "cuda_torch" / "lib").mkdir(parents=True)
    (tmp_path / "cuda_torch" / "lib" / "libtorch_cuda.so").touch()
    ask = "from pathlib import Path\nprint(setup['wants_cuda'](Path({!r})))"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for torch_folder, choice, expected in (
        ("cuda_torch", "AUTO", "True"),
        ("cpu_torch", "AUTO", "False"),
        ("cpu_torch", "ON", "True"),
        ("cuda_torch", "OFF", "False"),
    ):
        done = run_setup(
            then=ask.format(str(tmp_path / torch_folder)), PYOPS_CUDA=choice, PATH=path
        )
        assert done.stdout.split()[-1] == expected, done.stderr
    hidden = "import shutil\nshutil.which = lambda *a, **k: None"
    assert "nvcc is not on PATH" in one_paragraph(
        run_setup(hidden, ask.format(str(tmp_path)), PYOPS_CUDA="ON")
    )
    assert "PYOPS_CUDA=MAYBE" in one_paragraph(
        run_setup(then=ask.format(str(tmp_path)), PYOPS_CUDA="MAYBE")
    )


@pytest.mark.full
def test_nvcc_and_torch_are_of_one_cuda(run_setup: RunSetup, tmp_path: Path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    ask = "from pathlib import Path\nprint(setup['wants_cuda'](Path({!r})))"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for number, text in (
        ("12", "cuda: Optional[str] = '12.8'\n"),
        ("13", "cuda = '13.0'\n"),
        ("none", "cuda: Optional[str] = None\n"),
    ):
        (tmp_path / number / "lib").mkdir(parents=True)
        (tmp_path / number / "lib" / "libtorch_cuda.so").touch()
        (tmp_path / number / "version.py").write_text(f"__version__ = '2.13.0'\n{text}")
        for choice in ("AUTO", "ON"):
            done = run_setup(then=ask.format(str(tmp_path / number)), PYOPS_CUDA=choice, PATH=path)
            if number != "12":
                assert done.stdout.split()[-1] == "True", done.stderr
                continue
            message = one_paragraph(done)
            assert "of CUDA 13" in message
            assert "of CUDA 12" in message
            assert "CUDACXX" in message


@pytest.mark.full  # an installation by pip, which `make docs` runs
@pytest.mark.slow
def test_install_without_kernels(with_torch: ForkedPython, tmp_path: Path):
    """A wheel built with PYOPS_NO_EXT=1 holds no binary, imports, and steps in plain torch."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("setup.py", "build_backend.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    shutil.copytree(
        ROOT / "pyops",
        copy / "pyops",
        ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"),
    )
    target = tmp_path / "target"
    environment = {**os.environ, "PYOPS_NO_EXT": "1"}
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-compile",
        "--target",
        str(target),
    ]
    done = subprocess.run(
        [*install, str(copy)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))
    assert json.loads((target / "pyops" / "_build.json").read_text())["extension"] is False
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pyops, torch; from "
        "pyops.ops import reduce\n"
        "assert pyops.__file__.startswith(sys.argv[1]); assert not "
        "pyops.has_kernel('sum_rows_', 'cpu')\n"
        "out = torch.zeros(2); reduce.sum_rows_(out, [torch.ones(2)] * 3); assert "
        "out.tolist() == [3.0, 3.0]\n"
    )
    environment.pop("PYOPS_NO_EXT")
    done = with_torch.run(program, str(target), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_unbuilt_tree_says_how_to_build(with_torch: ForkedPython, tmp_path: Path):
    shutil.copytree(ROOT / "pyops", tmp_path / "pyops", ignore=BUILT)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYOPS_NO_EXT", "PYTHONPATH")}
    done = with_torch.run("import pyops; pyops.ops", cwd=tmp_path, env=environment)
    assert (
        f"ImportError: pyops is not built in {tmp_path / 'pyops'}. In the folder that "
        "holds setup.py, run: " in done.stderr
    )
    assert "pip install -e ." in done.stderr
    assert "hides" not in done.stderr


@pytest.mark.full
def test_a_checkout_that_hides_an_installed_pyops_says_so(with_torch: ForkedPython, tmp_path: Path):
    """Python started in an unbuilt checkout, or one that lost its kernels, while an installed pyops
    comes later on the path."""
    shutil.copytree(ROOT / "pyops", tmp_path / "checkout" / "pyops", ignore=BUILT)
    installed = tmp_path / "site" / "pyops"
    installed.mkdir(parents=True)
    (installed / "_build.json").write_text('{"extension": true}')
    environment = {k: v for k, v in os.environ.items() if k != "PYOPS_NO_EXT"}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    words = (
        f"It is a checkout that hides the pyops installed in {installed}: to use that one, "
        "start Python in another folder"
    )
    for begin in (
        f"pyops is not built in {tmp_path / 'checkout' / 'pyops'}. ",
        "_C.so is missing although pyops was built",
    ):
        done = with_torch.run(
            "import pyops; pyops.has_kernel('adam_', 'cpu')",
            cwd=tmp_path / "checkout",
            env=environment,
        )
        assert begin in done.stderr
        assert words in done.stderr
        (tmp_path / "checkout" / "pyops" / "_build.json").write_text('{"extension": true}')


def test_all_that_is_listed_can_be_imported(with_torch: ForkedPython):
    """README's rooms and the modules beside it, without what takes seconds to import and few
    programs use; what is not there is named with what is."""
    modules = {path.stem for path in (ROOT / "pyops").glob("*.py")}
    modules |= {path.parent.name for path in (ROOT / "pyops").glob("*/__init__.py")}
    program = (
        "import sys, pyops\nfor name in sys.argv[1:]: assert getattr(pyops, name).__name__ "
        "== 'pyops.' + name\n"
        "assert not {'torch._dynamo', 'transformers', 'sympy'} & set(sys.modules)\n"
        "pyops.nonsense"
    )
    inner = {
        "__init__",
        "__main__",
        "given_numbers",
        "name_patterns",
        "protocols",
        "renamed",
        "torch_private",
    }
    names = sorted(modules - inner)
    done = with_torch.run(program, *names, cwd=ROOT)
    told = done.stderr.splitlines()[-1]
    assert told.startswith("AttributeError: module 'pyops' has no attribute 'nonsense'; it has "), (
        done.stderr
    )
    assert set(told.partition("it has ")[2].split(", ")) == {*names, "has_kernel", "__version__"}


def test_importing_pyops_is_light():
    program = "import sys, pyops; assert 'torch' not in sys.modules; pyops.__version__"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


needs_kernels = pytest.mark.skipif(
    not library.build_info()["extension"], reason="installed without kernels"
)


@needs_kernels
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_ops_use_nothing_of_torch_but_its_stable_abi():
    names = subprocess.run(
        ["nm", "-D", "--undefined-only", str(ROOT / "pyops" / "_C.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    symbols = [line.split()[-1] for line in names.splitlines()]
    assert any(s.startswith("aoti_torch_") for s in symbols)
    foreign = [
        s for s in symbols if "c10" in s or "2at" in s or "5torch" in s or s.startswith("Py")
    ]
    assert not foreign, foreign


@pytest.mark.full
@needs_kernels
@pytest.mark.slow
def test_an_instruction_set_can_be_forced(with_torch: ForkedPython):
    program = "from pyops.ops import library; print(library.isa())"
    for name in library.isas()[:1]:
        done = with_torch.run(program, cwd=ROOT, env={**os.environ, "PYOPS_CPU_ISA": name})
        assert done.stdout.split() == [name], done.stderr
    done = with_torch.run(program, cwd=ROOT, env={**os.environ, "PYOPS_CPU_ISA": "sse9"})
    assert "ImportError: PYOPS_CPU_ISA=sse9 is not among" in done.stderr
