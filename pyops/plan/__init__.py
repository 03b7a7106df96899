"""The planner: which strategy, how much memory, how long, for a model and a cluster.

    shape = ModelShape.of_folder("llama-8b")                  # or of_gpt, of_numbers
    plan = best(shape, load_cluster("h100").with_devices(64), Options(batch=512))
    print(table(plan), explain(plan))
    plan.parallel_plan()                                      # for pyops.parallel.parallelize

| file | what it holds |
|---|---|
| shapes.py | a model as numbers |
| clusters.py, data/ | devices and links, from TOML; each figure with its source |
| layout.py | one way to share a training out; what the training program does |
| turns.py | what a pipeline's schedule costs |
| rank_memory.py, times.py | bytes of a rank and seconds of a step, term by term |
| layout_search.py | all layouts, priced, with reasons |
| result.py, show.py | Plan: as ParallelPlan, TOML, JSON, text |
| laws.py, failures.py | scaling, how long a training takes, when to save |
| machine.py | this machine, measured; costs of a profile |

Times are estimates until they are measured: docs/planner.md has what published runs took beside
what is predicted.
"""

from pyops.plan.clusters import Cluster, Device, Efficiency, Link, cluster_names, load_cluster
from pyops.plan.failures import Failures, spares
from pyops.plan.laws import SyncSGD, amdahl, compute_optimal, gustafson, training_days
from pyops.plan.layout import FSDP, MEGATRON, MEGATRON_CORE, PYOPS, Layout, Software
from pyops.plan.layout_search import Options, Priced, search
from pyops.plan.machine import Machine, ProfiledCosts
from pyops.plan.rank_memory import Memory, memory
from pyops.plan.result import Plan, best
from pyops.plan.shapes import ModelShape, PlanError
from pyops.plan.show import explain, summary, table
from pyops.plan.times import Case, StepTime, step_time

__all__ = [
    "FSDP",
    "MEGATRON",
    "MEGATRON_CORE",
    "PYOPS",
    "Case",
    "Cluster",
    "Device",
    "Efficiency",
    "Failures",
    "Layout",
    "Link",
    "Machine",
    "Memory",
    "ModelShape",
    "Options",
    "Plan",
    "PlanError",
    "Priced",
    "ProfiledCosts",
    "Software",
    "StepTime",
    "SyncSGD",
    "amdahl",
    "best",
    "cluster_names",
    "compute_optimal",
    "explain",
    "gustafson",
    "load_cluster",
    "memory",
    "search",
    "spares",
    "step_time",
    "summary",
    "table",
    "training_days",
]
