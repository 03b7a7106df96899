"""The house rule that imports point down, executed: a file imports only from lower layers or from
its own room.

LAYERS is the table of the rooms, lowest first, and FLOORS that of the folders and files within a
room. Both are the one place where they are written down; CONTRIBUTING.md shows them as `python -m
tests.project.test_layering` prints them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.project.test_sizes import entries

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyops"

LAYERS = [
    ["protocols", "renamed", "torch_private", "name_patterns", "given_numbers", "launchers"],
    # The contracts of the kernels; the only importer of torch.ops.pyops.
    ["ops", "failure", "host_heap", "host_memory"],
    ["mesh", "flat", "flight_record", "random", "deferred"],
    ["optim", "comm", "offload", "precision", "attention"],
    # Strategies, which never import each other.
    [
        "data_parallel",
        "local_sgd",
        "onebit",
        "parameter_server",
        "zero",
        "tensor_parallel",
        "context_parallel",
        "pipeline",
        "recompute",
        "checkpoint",
    ],
    ["models", "data", "sandblaster", "healing"],
    ["hub", "elastic", "distill", "pruning", "quantized", "token_data"],
    ["adapters", "parallel"],
    ["plan", "launch", "observe"],
    ["hf", "config", "train", "compress", "cli", "__main__"],
]
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
SAME_LAYER_ALLOWED = {
    "train": {"config"},
    "compress": {"train", "config"},
    "cli": {"train", "config", "compress"},
    "__main__": {"cli"},
}

# Folders and files of a room, lowest first; those of one list do not import each other. `__init__`
# stands above all of them.
FLOORS = {
    "attention": [
        ["blocks_named", "documents", "extent", "picture"],
        ["parts"],
        ["pattern"],
        ["layouts", "local_windows", "windows"],
        ["deepspeed", "pattern_text"],
        ["applied"],
    ],
    "checkpoint": [
        ["format"],
        ["flat_state", "loading", "writing"],
        ["background", "distributed"],
        ["folder", "memory"],
        ["convert"],
    ],
    "cli": [
        ["first_rank", "overrides", "simulate", "trials"],
        ["compressing", "data_command", "folder_commands", "launching", "observing", "planning"],
        ["commands"],
    ],
    "comm": [
        ["agreement", "broadcast", "failure"],
        ["collectives"],
        ["compression", "mpi"],
        ["buckets"],
    ],
    "compress": [
        ["folders", "steps"],
        ["settings", "use"],
        ["text"],
        ["learning", "measuring"],
        ["methods", "report"],
        ["picture"],
        ["run"],
    ],
    "config": [
        ["config_error"],
        [
            "distill_config",
            "folder_config",
            "observe_config",
            "parallel_config",
            "task_config",
            "training_sections",
        ],
        ["run_sections"],
        ["run_plan"],
        ["rules"],
        ["run_config"],
        ["reading"],
    ],
    "data": [
        ["bigram", "corpus", "images"],
        ["characters", "digits", "row_order", "tokenizer"],
        ["cache"],
        ["batches", "folder_text", "packing", "passages"],
    ],
    "elastic": [
        ["layout", "membership", "picture", "policy"],
        ["frozen", "planning"],
        ["config"],
        ["runtime"],
    ],
    "hub": [
        ["folder_files", "part_gathering", "weight_packing"],
        ["config_fields"],
        ["architectures"],
        ["folder_loading", "folder_saving", "pretrained"],
        ["checkpoint_conversion"],
    ],
    "models": [
        ["config_checks", "context", "rotary"],
        ["model_layout"],
        ["vocabulary_head"],
        ["bert", "coatnet", "gpt", "t5", "vit"],
        ["classifier"],
        ["generation"],
    ],
    "observe": [["flight", "profile", "replicas", "spikes", "stragglers", "trackers"], ["page"]],
    "onebit": [
        ["config", "steps"],
        ["communicating", "sharded"],
        ["communication_state"],
        ["two_phases"],
        ["adam", "lamb"],
        ["zero_one"],
    ],
    "ops": [
        ["memory"],
        ["library"],
        ["random"],
        ["attention", "communication", "layers", "optimizers"],
        ["codes", "sparse"],
        ["decoding"],
        ["symmetric_step", "triton"],
    ],
    "optim": [
        ["fused", "lr_scheduler"],
        [
            "adafactor",
            "adagrad",
            "adam",
            "backward",
            "lamb",
            "lars",
            "lbfgs",
            "lion",
            "one_bit",
            "sgd",
        ],
    ],
    "parallel": [
        ["dropout", "fused_head", "optimizer_groups", "plan"],
        ["losses"],
        ["rows", "stages"],
        ["generation", "model_checks", "weights"],
        ["trainer"],
        ["composition"],
    ],
    "parameter_server": [
        ["config", "messages", "snapshots", "vectors"],
        ["sessions", "shard"],
        ["endpoint", "leases"],
        ["client", "serving"],
        ["connecting", "virtual_time"],
    ],
    "pipeline": [
        ["schedules"],
        ["partition", "transport"],
        ["runtime"],
        ["post_validation", "profiling"],
    ],
    "plan": [
        ["shapes"],
        ["clusters", "failures", "laws", "layout"],
        ["costs", "settings"],
        ["layouts", "measuring"],
        ["result"],
        ["pictures", "show"],
    ],
    "pruning": [
        ["masks"],
        ["packed", "ranking", "sparsity_report", "symmetries"],
        ["nm"],
        ["permutation", "saving", "straight_through", "training"],
    ],
    "quantized": [
        ["formats", "report"],
        ["linear_shape"],
        ["linear"],
        ["layers"],
        ["calibration"],
        ["conversion", "fake_layers"],
        ["saving", "training"],
    ],
    "tensor_parallel": [["functional"], ["layers"], ["convert", "grids"]],
    "train": [
        ["host", "report", "setup", "tasks"],
        ["initial_weights", "loop"],
        ["token_training"],
        ["pretrained", "sample_training", "text_training"],
        ["lr_range", "run"],
    ],
    "zero": [
        ["agreement", "axis_groups", "config", "optimizer_factory"],
        ["checks", "layout"],
        ["hooks"],
        ["build", "update"],
        ["setup", "state"],
        ["optimizer"],
    ],
}
FORBIDDEN_NAMES = ("util", "utils", "helper", "helpers", "common", "core", "manager", "misc")


def room_of(path: Path) -> str:
    """The room a source file of the package belongs to: its folder, or its own stem."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body and of all bodies within it."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, field, ()))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from statements(part.body)


@functools.cache
def imports_of(source: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The imports of a source, and those of them that stand at its top or in an `if` there.

    Several rules look at the same files. Their trees are not kept: collections of garbage, which
    would go through all of them again and again, took most of the time of the rules.
    """
    body = ast.parse(source).body
    top = [n for each in body for n in (each.body if isinstance(each, ast.If) else [each])]
    imports = functools.partial(filter, lambda n: isinstance(n, ast.Import | ast.ImportFrom))
    return list(imports(statements(body))), list(imports(top))


def imported_modules(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> set[str]:
    """Modules of pyops that nodes of a module's tree import; `package` is the module's package, for
    relative imports."""
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            modules.update(f"{module}.{alias.name}" for alias in node.names)
    return {module for module in modules if module.startswith("pyops.")}


def violations(path: Path, source: str) -> list[str]:
    """The imports of a file that go up or sideways: to another room, or to another folder or file
    of its own room."""
    place = path.relative_to(PACKAGE).with_suffix("").parts
    room, entry = place[0], place[1] if len(place) > 1 else "__init__"
    floor_of = {
        entry: floor for floor, entries in enumerate(FLOORS.get(room, [])) for entry in entries
    }
    found = []
    for module in sorted(imported_modules(imports_of(source)[0], ("pyops", *place[:-1]))):
        other, *rest = module.split(".")[1:]
        if other != room and other in LAYER_OF:
            sideways = LAYER_OF[other] == LAYER_OF[room] and other not in SAME_LAYER_ALLOWED.get(
                room, set()
            )
            if LAYER_OF[other] > LAYER_OF[room] or sideways:
                found.append(
                    f"{path.relative_to(ROOT)} (layer {LAYER_OF[room]}) imports {other} "
                    f"(layer {LAYER_OF[other]})"
                )
        elif (
            other == room
            and entry in floor_of
            and rest
            and rest[0] != entry
            and floor_of.get(rest[0], -1) >= floor_of[entry]
        ):
            found.append(
                f"{path.relative_to(ROOT)} (floor {floor_of[entry]}) imports {module} "
                f"(floor {floor_of[rest[0]]})"
            )
    return found


def package_files() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_every_room_has_a_layer():
    unknown = {room_of(p) for p in package_files()} - set(LAYER_OF)
    assert not unknown, f"give these rooms a layer in LAYERS: {sorted(unknown)}"


def test_every_folder_within_a_room_has_a_floor():
    cut = {p.parent.parent.name for p in PACKAGE.glob("*/*/__init__.py")}
    assert cut == set(FLOORS)
    for room, floors in FLOORS.items():
        assert sorted(entry for floor in floors for entry in floor) == sorted(
            entries(PACKAGE / room)
        ), room


def test_every_bench_is_found_by_its_name_alone():
    names = [p.stem for p in (ROOT / "benchmarks").rglob("bench_*.py")]
    assert names
    assert len(names) == len(set(names)), sorted(names)
    packages = {p.parent for p in (ROOT / "benchmarks").rglob("__init__.py")}
    assert {p.parent for p in (ROOT / "benchmarks").rglob("*.py")} <= packages


def test_no_module_is_hidden_by_a_function_of_its_name():
    import pyops

    hidden = []
    for info in pkgutil.walk_packages(pyops.__path__, "pyops."):
        parent, _, name = info.name.rpartition(".")
        if parent == "pyops" or name == "__main__" or parent.startswith("pyops.ops.triton"):
            continue
        module = importlib.import_module(info.name)
        if vars(sys.modules[parent]).get(name) is not module:
            hidden.append(info.name)
    assert not hidden


def files_that_circle() -> list[str]:
    """Files that import each other at the top of the file, directly or through others; for their
    types alone, too."""
    graph = {}
    for path in package_files():
        place = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules = imported_modules(imports_of(path.read_text())[1], place[:-1])
        graph[".".join(place)] = {name for m in modules for name in (m, m.rpartition(".")[0])}
    while leaves := [
        module for module, others in graph.items() if not others & (set(graph) - {module})
    ]:
        for module in leaves:
            del graph[module]
    return sorted(graph)


def test_no_imports_go_in_a_circle():
    assert not files_that_circle()


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
        ("comm/collectives/ring.py", "from pyops.comm.compression.codec import Codec"),
        ("zero/layout/units.py", "import pyops.zero.optimizer"),
        ("optim/adam.py", "from pyops.optim import sgd"),
    ],
)
def test_the_rule_sees_an_upward_or_sideways_import(place: str, source: str):
    assert violations(PACKAGE / place, source)


def test_only_ops_calls_the_kernels():
    found = [
        str(p.relative_to(ROOT))
        for p in package_files()
        if room_of(p) != "ops" and "torch.ops.pyops" in p.read_text()
    ]
    assert not found, f"call the wrappers in pyops.ops instead: {found}"


def test_optimizers_know_no_process_group():
    def imported(path: Path) -> set[str]:
        lines = path.read_text().splitlines()
        return {
            word for line in lines if "import" in line for word in line.replace(".", " ").split()
        }

    found = [
        str(p.relative_to(ROOT))
        for p in package_files()
        if room_of(p) == "optim" and "distributed" in imported(p)
    ]
    assert not found, found


def test_no_room_is_called_by_a_word_that_says_nothing():
    found = [
        str(p.relative_to(ROOT))
        for folder in ("pyops", "csrc", "tests", "benchmarks")
        for p in (ROOT / folder).rglob("*")
        if p.stem in FORBIDDEN_NAMES
    ]
    assert not found, found


def test_every_room_is_reached_from_the_package():
    import pyops

    rooms = {room_of(p) for p in package_files()} - {
        "__main__",
        "given_numbers",
        "name_patterns",
        "protocols",
        "renamed",
        "torch_private",
    }
    assert rooms == set(pyops._ROOMS)
    assert all(getattr(pyops, room).__name__ == f"pyops.{room}" for room in rooms)


def table() -> str:
    """The layers and the floors, highest first, as CONTRIBUTING.md shows them."""
    lines = [f"{number}  {'  '.join(rooms)}" for number, rooms in reversed(list(enumerate(LAYERS)))]
    width = max(map(len, FLOORS))
    lines += [
        f"{room:{width}}  {' < '.join(' '.join(floor) for floor in floors)}"
        for room, floors in FLOORS.items()
    ]
    return "\n".join(f"    {line}".rstrip() for line in lines)


def test_contributing_shows_the_table():
    assert table() in (ROOT / "CONTRIBUTING.md").read_text(), (
        "put there what python -m tests.project.test_layering prints"
    )


if __name__ == "__main__":
    print(table())
