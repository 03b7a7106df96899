"""The build backend, setuptools' own, that asks for a torch to compile against only where the
environment has none.

    pip install .  -> get_requires_for_build_wheel   nothing, or torch>=2.11 where there is none
                   -> build_wheel -> setup.py -> find_torch   the target's, or the build's own

pip builds in an environment of its own, from which the packages of the environment that the install
is for can't be imported. Only headers are needed, so torch is found on disk and never imported; any
torch from 2.11 on will do, and what is built against it runs with all of them, because the ops use
LibTorch's stable ABI alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # all hooks that this setuptools has; two are replaced below

OLDEST_TORCH = (2, 11)
ASK = (
    "import importlib.util as u; s = u.find_spec('torch'); print(*(s and "
    "s.submodule_search_locations or [])[:1])"
)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch_to_install()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch_to_install()]


def without_kernels() -> bool:
    """Whether PYOPS_NO_EXT says that nothing is to be compiled."""
    return os.environ.get("PYOPS_NO_EXT", "0") not in ("", "0")


def find_torch() -> Path | None:
    """The folder of a torch to compile against: PYOPS_TORCH, that of this environment, or of the
    one that pip installs for."""
    if named := os.environ.get("PYOPS_TORCH"):
        return Path(named)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return _torch_of_target()


def torch_version(folder: Path) -> str:
    """What the torch in `folder` says of itself; "unknown" where it says nothing."""
    try:
        found = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"


def is_new_enough(folder: Path) -> bool:
    """Whether the torch in `folder` has what is compiled against."""
    parts = tuple(int(part) for part in re.findall(r"\d+", torch_version(folder))[:2])
    return parts >= OLDEST_TORCH and (folder / "include/torch/csrc/stable/library.h").exists()


def _torch_to_install() -> list[str]:
    if without_kernels():
        return []
    folder = find_torch()
    return (
        []
        if folder is not None and is_new_enough(folder)
        else [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]
    )


def _torch_of_target() -> Path | None:
    """pip hides that environment from a build by PYTHONPATH and PYTHONNOUSERSITE alone; its Python
    runs the build."""
    shown = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONNOUSERSITE")
    }
    with (
        tempfile.TemporaryDirectory() as empty
    ):  # a Python that runs -c looks into its working folder first
        done = subprocess.run(
            [sys.executable, "-c", ASK], cwd=empty, env=shown, capture_output=True, text=True
        )
    folder = done.stdout.strip()
    return Path(folder) if done.returncode == 0 and folder else None
