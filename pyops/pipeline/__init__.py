"""Pipeline parallelism: every schedule as data, proven before it runs, simulated, drawn and
executed.

schedule("1f1b", num_stages=4, num_microbatches=16)     -> Schedule: what each rank computes, in its order
simulate(schedule, Costs(forward=1.0, latency=0.1))      -> Timeline: makespan, bubble, peak memory
Pipeline(layers, schedule=..., group=..., loss=...).step(batch, target)      -> the loss; gradients are in .grad
Pipeline(..., optimizer=lambda parameters: SGD(parameters, lr=0.1))      steps in the stream: "pipedream", "pipemare", ...
profile(layers, inputs)                                  -> Profile: seconds and bytes of each layer, measured
balance(profile, num_stages=4)                           -> which layers go to which stage; profile.costs(boundaries) -> Costs

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
from pyops.pipeline.runtime.skips import skip, skip_pairs
from pyops.pipeline.runtime.stage_optimizer import PipeMareOptions
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.draw import draw, text, trace
from pyops.pipeline.schedules.names import NAMES, custom, schedule
from pyops.pipeline.schedules.orders import Transfer
from pyops.pipeline.schedules.schedule import Schedule
from pyops.pipeline.schedules.simulate import Costs, Timeline, simulate

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "LayerCosts",
    "PipeMareOptions",
    "Pipeline",
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
