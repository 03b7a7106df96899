"""The house rule that imports point down, executed: a file imports only from lower layers or from its own room.

5  hub  config  train  metrics  display  cli train -> config and cli -> both are the sanctioned exceptions
4  models  data  parallel
3  data_parallel  onebit  checkpoint  schedules   strategies; never import each other
2  optim  comm  offload  precision
1  mesh  flat  random  arena  deferred
0  ops                                       the contracts of the kernels; the only importer of torch.ops.pyops
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyops"

LAYERS = {
    "ops": 0,
    "mesh": 1, "flat": 1, "random": 1, "arena": 1, "deferred": 1,
    "optim": 2, "comm": 2, "offload": 2, "precision": 2,
    "data_parallel": 3, "onebit": 3, "zero": 3, "tensor_parallel": 3, "pipeline": 3, "recompute": 3, "checkpoint": 3,
    "schedules": 3,
    "models": 4, "data": 4, "parallel": 4,
    "hub": 5, "simulation": 5, "elastic": 5, "config": 5, "metrics": 5, "display": 5, "train": 5, "cli": 5, "__main__": 5,
}  # fmt: skip
SAME_LAYER_ALLOWED = {
    "train": {"config", "metrics", "display", "elastic"}, "cli": {"train", "config", "hub", "simulation"}, "__main__": {"cli"},
}  # fmt: skip
FORBIDDEN_NAMES = ("util", "utils", "helper", "helpers", "common", "core", "manager", "misc")


def room_of(path: Path) -> str:
    """The room a source file of the package belongs to: its folder, or its own stem."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_rooms(source: str, package: tuple[str, ...]) -> set[str]:
    """Rooms of pyops that a module's source imports; `package` is the module's package, for relative imports."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "pyops" else [module]
        rooms.update(name.split(".")[1] for name in names if name.startswith("pyops."))
    return {room for room in rooms if room in LAYERS}


def violations(path: Path, source: str) -> list[str]:
    room = room_of(path)
    package = ("pyops", *path.relative_to(PACKAGE).parts[:-1])
    found = []
    for other in sorted(imported_rooms(source, package) - {room}):
        sideways = LAYERS[other] == LAYERS[room] and other not in SAME_LAYER_ALLOWED.get(room, set())
        if LAYERS[other] > LAYERS[room] or sideways:
            found.append(f"{path.relative_to(ROOT)} (layer {LAYERS[room]}) imports {other} (layer {LAYERS[other]})")
    return found


def package_files() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_every_room_has_a_layer():
    unknown = {room_of(p) for p in package_files()} - set(LAYERS)
    assert not unknown, f"give these rooms a layer in LAYERS: {sorted(unknown)}"


def test_imports_point_down():
    found = [line for p in package_files() for line in violations(p, p.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("optim/adam.py", "from pyops.comm import all_reduce"),
        ("comm/collectives/ring.py", "import pyops.train"),
        ("flat.py", "from . import mesh"),
        ("optim/adam.py", "from ..data_parallel import DataParallel"),
        ("checkpoint/save.py", "from pyops import data_parallel"),
    ],
)
def test_the_rule_sees_an_upward_or_sideways_import(place: str, source: str):
    assert violations(PACKAGE / place, source)


def test_only_ops_calls_the_kernels():
    found = [str(p.relative_to(ROOT)) for p in package_files() if room_of(p) != "ops" and "torch.ops.pyops" in p.read_text()]
    assert not found, f"call the wrappers in pyops.ops instead: {found}"


def test_optimizers_know_no_process_group():
    def imported(path: Path) -> set[str]:
        lines = path.read_text().splitlines()
        return {word for line in lines if "import" in line for word in line.replace(".", " ").split()}

    found = [str(p.relative_to(ROOT)) for p in package_files() if room_of(p) == "optim" and "distributed" in imported(p)]
    assert not found, found


def test_no_room_is_called_by_a_word_that_says_nothing():
    found = [str(p.relative_to(ROOT)) for folder in ("pyops", "csrc", "tests", "benchmarks") for p in
             (ROOT / folder).rglob("*") if p.stem in FORBIDDEN_NAMES]  # fmt: skip
    assert not found, found


def test_every_room_is_reached_from_the_package():
    import pyops

    rooms = {room_of(p) for p in package_files()} - {"__main__"}
    assert rooms == set(pyops._ROOMS)
    assert all(getattr(pyops, room).__name__ == f"pyops.{room}" for room in rooms)
