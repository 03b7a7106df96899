"""Pipeline parallelism: every schedule as data, proven before it runs, simulated, drawn and
executed.

    plan = schedule("1f1b", num_stages=4, num_microbatches=16)     what each rank computes, in order
    simulate(plan, Costs(forward=1.0, latency=0.1))                -> Timeline: makespan, bubble,
                                                                      peak memory
    Pipeline(layers, schedule=plan, group=group, loss=loss)
        .step(batch, target)                                       -> the loss; gradients in .grad
    Pipeline(..., optimizer=lambda parameters: SGD(parameters, lr=0.1))
                                                                   asynchronous: "pipedream", ...
    profile(layers, inputs)                                        -> Profile: measured seconds and
                                                                      bytes of each layer
    balance(profile, num_stages=4)                                 -> which layers go to which stage

| folder or file | what it does |
|---|---|
| schedules | a schedule as data: the families by name, proofs, the simulator, pictures |
| partition | what layers cost, and which go to which stage |
| transport | what goes from rank to rank, and what happens to it when something fails |
| runtime | Pipeline: the actions of a schedule, executed |
| profiling.py | profile: the layers of a model, measured |
| post_validation.py | steps that are taken before the norm of the gradients is known |
"""

from pyops.pipeline.partition.balance import balance
from pyops.pipeline.partition.dapple_planner import plan_dapple
from pyops.pipeline.partition.layer_costs import LayerCosts, Profile
from pyops.pipeline.partition.pipedream_planner import plan_pipedream
from pyops.pipeline.partition.pipeline_plan import PipelinePlan, PlannedStage
from pyops.pipeline.post_validation import PostValidation
from pyops.pipeline.profiling import profile
from pyops.pipeline.runtime.pipeline import Pipeline
from pyops.pipeline.runtime.pipeline_config import PipelineConfig, PipeMareOptions
from pyops.pipeline.runtime.skips import skip, skip_pairs
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.draw import draw, text, trace
from pyops.pipeline.schedules.names import NAMES, custom, schedule
from pyops.pipeline.schedules.orders import Transfer
from pyops.pipeline.schedules.schedule import Schedule
from pyops.pipeline.schedules.simulate import Costs, Timeline, simulate
from pyops.renamed import missing_attribute

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "LayerCosts",
    "PipeMareOptions",
    "Pipeline",
    "PipelineConfig",
    "PipelinePlan",
    "PlannedStage",
    "PostValidation",
    "Profile",
    "Schedule",
    "Timeline",
    "Transfer",
    "balance",
    "custom",
    "draw",
    "plan_dapple",
    "plan_pipedream",
    "profile",
    "schedule",
    "simulate",
    "skip",
    "skip_pairs",
    "text",
    "trace",
]


def __getattr__(name: str) -> object:
    raise missing_attribute(__name__, name)
