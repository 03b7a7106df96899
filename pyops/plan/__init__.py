"""The planner: which strategy, how much memory, how long, for a model and a cluster.

    shape = ModelShape.of_folder("llama-8b")                  # or of_gpt, of_numbers
    plan = best(shape, load_cluster("h100").with_devices(64), Options(batch=512))
    print(table(plan), explain(plan))
    plan.parallel_plan()                                      # for pyops.parallel.parallelize

| file | what it holds |
|---|---|
| shapes/ | a model as numbers: a decoder, a CoAtNet; a decoder with experts, counted alone |
| clusters.py, data/ | devices and links, from TOML; each figure with its source |
| layout.py | one way to share a training out; what the training program does |
| costs/ | bytes of a rank and seconds of a step, term by term: what is computed, messages, turns |
| layouts/ | all layouts, priced; the best, and why not the others |
| result.py, settings.py, show.py | Plan: as ParallelPlan, TOML, JSON, text |
| pictures.py | memory, time and scaling of a plan, drawn |
| laws.py, failures.py | scaling, how long a training takes, when to save |
| measuring/ | this machine, measured; a model's blocks; costs of a profile |

Times are estimates until they are measured: docs/planner.md has what published runs took beside
what is predicted.
"""

from pyops.plan.clusters import Cluster, Device, Efficiency, Host, Link, cluster_names, load_cluster
from pyops.plan.costs.computing import Case
from pyops.plan.costs.experts import expert_state_bytes
from pyops.plan.costs.images import ImageCase, image_memory, image_step
from pyops.plan.costs.measured import Line, MeasuredCosts, MeasuredLayers
from pyops.plan.costs.rank_memory import Memory, memory
from pyops.plan.costs.times import StepTime, step_time
from pyops.plan.failures import Failures, spares
from pyops.plan.laws import SyncSGD, amdahl, compute_optimal, gustafson, training_days
from pyops.plan.layout import FSDP, MEGATRON, MEGATRON_CORE, PYOPS, Layout, Software
from pyops.plan.layouts.options import Options
from pyops.plan.layouts.pricing import Priced
from pyops.plan.layouts.search import search
from pyops.plan.measuring.blocks import measure_blocks
from pyops.plan.measuring.layers import measure_layers
from pyops.plan.measuring.machine import Machine
from pyops.plan.measuring.profiled import ProfiledCosts
from pyops.plan.pictures import draw
from pyops.plan.result import Plan, best
from pyops.plan.shapes import (
    Experts,
    ExpertShape,
    ImageShape,
    LatentAttention,
    ModelShape,
    PlanError,
    decoder_of_folder,
)
from pyops.plan.show import explain, summary, table

__all__ = [
    "FSDP",
    "MEGATRON",
    "MEGATRON_CORE",
    "PYOPS",
    "Case",
    "Cluster",
    "Device",
    "Efficiency",
    "ExpertShape",
    "Experts",
    "Failures",
    "Host",
    "ImageCase",
    "ImageShape",
    "LatentAttention",
    "Layout",
    "Line",
    "Link",
    "Machine",
    "MeasuredCosts",
    "MeasuredLayers",
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
    "decoder_of_folder",
    "draw",
    "expert_state_bytes",
    "explain",
    "gustafson",
    "image_memory",
    "image_step",
    "load_cluster",
    "measure_blocks",
    "measure_layers",
    "memory",
    "search",
    "spares",
    "step_time",
    "summary",
    "table",
    "training_days",
]
