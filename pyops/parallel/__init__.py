"""One entry for a model of your own: a plan in, a trainer out, on any layout of ranks.

    plan = ParallelPlan(tp=2, pp=2, zero=ZeroConfig(stage=1))
    trainer = parallelize("llama-folder", plan, optimizer=lambda params: AdamW(params, lr=1e-5))
    loss = trainer.step({"input_ids": tokens, "labels": tokens})
    trainer.save_pretrained("llama-tuned")

| file or folder | what it does |
|---|---|
| plan.py | ParallelPlan, PipelineOptions: how the ranks share a model out |
| composition.py | parallelize: the order in which the parts are put together |
| trainer.py | Trainer: step, evaluate, save, load, save_pretrained |
| optimizer_groups.py | OptimizerGroups: parameters that learn differently |
| losses.py | losses as (sum, count), divided once |
| fused_head.py | the loss in the last layer of a language model, without whole logits |
| rows | which rows of a step are whose, and which of their tokens |
| dropout | dropout whose masks are the same on every layout |
| generation.py | tokens that follow a prompt |
| weights.py | where a model's values come from, and how they go back |
| stages | a model cut into the stages of a pipeline: between its blocks, or its own layers |
"""

from __future__ import annotations

from pyops.parallel.composition import parallelize
from pyops.parallel.losses import PairLoss
from pyops.parallel.optimizer_groups import OptimizerGroups, no_decay_for_vectors
from pyops.parallel.plan import ParallelPlan, PipelineOptions
from pyops.parallel.stages.layered_model import LayeredModel
from pyops.parallel.trainer import Trainer
from pyops.renamed import missing_attribute

__all__ = [
    "LayeredModel",
    "OptimizerGroups",
    "PairLoss",
    "ParallelPlan",
    "PipelineOptions",
    "Trainer",
    "no_decay_for_vectors",
    "parallelize",
]


def __getattr__(name: str) -> object:
    if name == "ParallelConfig":  # where it was before there was this subpackage
        raise ImportError(
            "ParallelConfig is not here any more: pyops.config.ParallelConfig", name=name
        )
    raise missing_attribute(__name__, name)
