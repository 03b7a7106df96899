"""Pipeline parallelism: every schedule as data, proven before it runs, simulated, drawn and executed.

schedule("1f1b", num_stages=4, num_microbatches=16)     -> Schedule: what each rank computes, in its order
simulate(schedule, Costs(forward=1.0, latency=0.1))      -> Timeline: makespan, bubble, peak memory
Pipeline(layers, schedule=..., group=..., loss=...).step(batch, target)      -> the loss; gradients are in .grad
Pipeline(..., optimizer=lambda parameters: SGD(parameters, lr=0.1))      steps in the stream: "pipedream", "pipemare", ...
profile(layers, inputs)                                  -> Profile: seconds and bytes of each layer, measured
balance(profile, num_stages=4)                           -> which layers go to which stage; profile.costs(boundaries) -> Costs

| files | what they do |
|---|---|
| action, orders, schedule, validate | a schedule as data, what follows from it, and what it must be |
| families, asynchronous, names | the schedules there are, by name |
| simulate, draw | a schedule in time, as pictures, text and traces |
| layer_costs, profile, balance | what layers cost, and which go to which stage |
| plan, pipedream_planner, dapple_planner | stages of several devices |
| pipeline, agreed, microbatch | Pipeline: what users call, what ranks agree on, how a batch is cut |
| execute, stage | a rank's actions, one after the other; a stage's forward and backward |
| message, channel, mailboxes, links, interrupt | what goes from rank to rank, and what happens to it when something fails |
| tied, batch_norm, skips | what reaches beyond one stage or one micro-batch |
| versions, stepping, stream, post_validation | optimizer steps within a schedule, and those taken before the norm is known |
"""

from pyops.pipeline.action import Action
from pyops.pipeline.balance import balance
from pyops.pipeline.dapple_planner import plan_dapple
from pyops.pipeline.draw import draw, text, trace
from pyops.pipeline.layer_costs import LayerCosts, Profile
from pyops.pipeline.names import NAMES, custom, schedule
from pyops.pipeline.orders import Transfer
from pyops.pipeline.pipedream_planner import plan_pipedream
from pyops.pipeline.pipeline import Pipeline
from pyops.pipeline.plan import Plan, PlannedStage
from pyops.pipeline.post_validation import PostValidation
from pyops.pipeline.profile import profile
from pyops.pipeline.schedule import Schedule
from pyops.pipeline.simulate import Costs, Timeline, simulate
from pyops.pipeline.skips import skip, skip_pairs
from pyops.pipeline.stepping import Remedies

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "LayerCosts",
    "Pipeline",
    "Plan",
    "PlannedStage",
    "PostValidation",
    "Profile",
    "Remedies",
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
