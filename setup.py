"""Runs CMake and places what it built into the package; everything about compiling stands in
CMakeLists.txt.

PYOPS_NO_EXT=1            install the plain-torch path, no compiler needed
PYOPS_TORCH=FOLDER        compile against the torch package in this folder, of any Python
PYOPS_CUDA=AUTO|ON|OFF    AUTO: CUDA kernels if nvcc exists and torch is a CUDA build; no GPU needed
CMAKE_CUDA_ARCHITECTURES  default 80-real;90-real;90-virtual
CXX, MAX_JOBS             the compiler; how many compile jobs at once
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

from build_backend import OLDEST_TORCH, find_torch, is_new_enough, torch_version, without_kernels

ROOT = Path(__file__).resolve().parent
ARTEFACTS = ("_C.so", f"_native{sysconfig.get_config_var('EXT_SUFFIX')}", "_build.json")


class BuildError(SystemExit):
    """One paragraph that says what is missing and how to get it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\npyops: {message}\n")


def package_folder(name: str, fix: str) -> Path:
    """Folder of an installed Python package, found on disk and not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(fix)
    return Path(next(iter(spec.submodule_search_locations)))


def torch_to_build_against() -> tuple[Path, str]:
    """(folder, version) of the torch that was found, if it will do."""
    folder, oldest = find_torch(), ".".join(map(str, OLDEST_TORCH))
    if folder is None:
        raise BuildError(
            f"no torch was found for {sys.executable}, and the kernels are compiled "
            f"against its headers. Install {oldest} or "
            "newer there (`pip install torch`) and build again; without "
            "--no-build-isolation pip fetches one for the build."
        )
    if not is_new_enough(folder):
        raise BuildError(
            f"the torch in {folder} is {torch_version(folder)}, and pyops needs torch "
            f"{oldest} or newer, with its headers "
            f"(include/torch/csrc/stable/library.h). Install one: `pip install 'torch>={oldest}'`."
        )
    return folder, torch_version(folder)


def find_program(*names: str) -> str | None:
    """A program on PATH, or beside the Python that runs the build (where pip puts cmake and
    ninja). In a virtual environment its own come first: another ninja or cmake on the PATH of one
    of two builds would compile everything again."""
    places = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    if sys.prefix != sys.base_prefix:
        places.reverse()
    search = os.pathsep.join(places)
    return next(
        (found for name in names if name and (found := shutil.which(name, path=search))), None
    )


def find_compiler() -> str:
    compiler = find_program(os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++")
    if compiler is None:
        raise BuildError(
            "no C++ compiler was found. Install one (Debian, Ubuntu: `apt-get install "
            "g++`), or name it with CXX=..., or set "
            "PYOPS_NO_EXT=1 to install pyops without kernels: everything then works in "
            "plain torch, slower."
        )
    return compiler


def wants_cuda(torch: Path) -> bool:
    choice = os.environ.get("PYOPS_CUDA", "AUTO").upper()
    if choice not in ("AUTO", "ON", "OFF"):
        raise BuildError(f"PYOPS_CUDA={choice} is none of AUTO, ON, OFF.")
    nvcc = find_program("nvcc", "/usr/local/cuda/bin/nvcc")
    if choice == "ON" and nvcc is None:
        raise BuildError(
            "PYOPS_CUDA=ON, but nvcc is not on PATH. Install the CUDA toolkit, or set "
            "PYOPS_CUDA=OFF."
        )
    cuda_torch = any((torch / "lib").glob("libtorch_cuda.*"))
    wanted = choice == "ON" or (choice == "AUTO" and nvcc is not None and cuda_torch)
    if wanted:
        check_cuda_versions(torch, os.environ.get("CUDACXX") or str(nvcc))
    return wanted


def check_cuda_versions(torch: Path, nvcc: str) -> None:
    """BuildError where nvcc and torch are of different major versions of CUDA: kernels of CUDA 13
    find a driver too old that torch for CUDA 12 runs on, at the first step of a training."""
    of_torch = re.search(r"^cuda\b[^=]*= '(\d+)", _text(torch / "version.py"), re.MULTILINE)
    said = ""
    with contextlib.suppress(OSError):
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    of_nvcc = re.search(r"release (\d+)", said)
    if of_torch and of_nvcc and of_torch.group(1) != of_nvcc.group(1):
        raise BuildError(
            f"{nvcc} is of CUDA {of_nvcc.group(1)} and the torch in {torch} of CUDA "
            f"{of_torch.group(1)}: on a driver for the older one the kernels would not run. Name "
            f"an nvcc of CUDA {of_torch.group(1)} with CUDACXX=..., or set PYOPS_CUDA=OFF."
        )


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def one_build_at_a_time(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def place(source: Path, target: Path) -> None:
    """Copy beside the target, then rename: a process that has the old file loaded keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, fresh)
    os.replace(fresh, target)


def forget_another_tree(build: Path) -> None:
    """CMake refuses a build folder that was copied or moved together with its sources."""
    cache = build / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
        cache.unlink()
        shutil.rmtree(build / "CMakeFiles", ignore_errors=True)


def run_cmake(build: Path) -> None:
    """Configure and build in `build`; leaves _C.so, _native.*.so and _build.json there."""
    cmake = find_program("cmake")
    if cmake is None:
        raise BuildError(
            "cmake was not found. `pip install cmake ninja` is enough; or set "
            "PYOPS_NO_EXT=1 to build no kernels."
        )
    torch, version_of_torch = torch_to_build_against()
    pybind11 = (
        package_folder(
            "pybind11", "pybind11 is not installed; `pip install pybind11` and build again."
        )
        / "include"
    )
    cuda = wants_cuda(torch)
    ninja = find_program("ninja")
    arguments = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": find_compiler(),
        "PYOPS_TORCH": torch,
        "PYOPS_TORCH_VERSION": version_of_torch,
        "PYOPS_CUDA": "ON" if cuda else "OFF",
        "PYOPS_PYBIND11": pybind11,
        "PYOPS_PYTHON_INCLUDE": sysconfig.get_paths()["include"],
        "PYOPS_NATIVE_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }
    if cuda:
        nvcc = find_program("nvcc", "/usr/local/cuda/bin/nvcc")
        arguments["CMAKE_CUDA_COMPILER"] = os.environ.get("CUDACXX") or nvcc
        arguments["CMAKE_CUDA_ARCHITECTURES"] = os.environ.get(
            "CMAKE_CUDA_ARCHITECTURES", "80-real;90-real;90-virtual"
        )
    if ninja:
        arguments["CMAKE_MAKE_PROGRAM"] = ninja
    print(
        f"pyops: torch {version_of_torch} in {torch}; CUDA kernels {'on' if cuda else 'off'}",
        flush=True,
    )
    if not (Path(arguments["PYOPS_PYTHON_INCLUDE"]) / "Python.h").exists():
        headers = arguments["PYOPS_PYTHON_INCLUDE"]
        raise BuildError(
            f"Python.h is not in {headers}: install Python's headers (`apt-get install "
            "python3-dev`)."
        )
    generator = ["-G", "Ninja" if ninja else "Unix Makefiles"]
    jobs = (
        os.environ.get("MAX_JOBS")
        or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
        or str(os.cpu_count() or 1)
    )
    configure = [
        cmake,
        *generator,
        "-S",
        str(ROOT),
        "-B",
        str(build),
        *(f"-D{k}={v}" for k, v in arguments.items()),
    ]
    for command in (configure, [cmake, "--build", str(build), "--parallel", jobs]):
        if subprocess.run(command).returncode != 0:
            raise BuildError(
                "the build failed; the compiler's message stands above. The command "
                f"was: {' '.join(command)}"
            )


class CMakeBuild(build_ext):
    """`build_ext` that hands over to CMake; in place for editable installs."""

    def target(self) -> Path:
        return (
            ROOT / "pyops" if self.inplace or self.editable_mode else Path(self.build_lib) / "pyops"
        )

    def run(self) -> None:
        target = self.target()
        if without_kernels():
            self.install_without_kernels(target)
            return
        flavour = f"{sys.implementation.cache_tag}-{os.environ.get('PYOPS_CUDA', 'AUTO').lower()}"
        build = ROOT / "build" / f"cmake-{flavour}-{'ninja' if find_program('ninja') else 'make'}"
        with one_build_at_a_time(build):
            forget_another_tree(build)
            run_cmake(build)
            for name in ARTEFACTS:
                place(build / name, target / name)

    def install_without_kernels(self, target: Path) -> None:
        print(
            "pyops: PYOPS_NO_EXT=1, no kernels are built; every op runs in plain torch", flush=True
        )
        target.mkdir(parents=True, exist_ok=True)
        for name in ARTEFACTS:
            (target / name).unlink(missing_ok=True)
        (target / "_build.json").write_text(json.dumps({"extension": False, "cuda": False}) + "\n")

    def get_outputs(self) -> list[str]:
        return [str(path) for name in ARTEFACTS if (path := self.target() / name).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def version() -> str:
    """The version stands once, in pyops/__init__.py."""
    found = re.search(
        r'^__version__ = "([^"]+)"', (ROOT / "pyops" / "__init__.py").read_text(), re.MULTILINE
    )
    assert found, "pyops/__init__.py must say __version__"
    return found.group(1)


setup(
    version=version(),
    packages=find_packages(include=["pyops", "pyops.*"]),
    package_data={"pyops": ["py.typed"], "pyops.plan": ["data/*.toml"]},
    ext_modules=[Extension("pyops._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
)
