"""The sections of a run as the ParallelPlan of `pyops.parallel.parallelize`, for a GPT and for a
Hugging Face folder alike.

| section | of the plan |
|---|---|
| [parallel] tp, pp, dp, cp, sequence_parallel; of a folder cp_method, cp_order | the same |
| [parallel] schedule, v, recompute, num_microbatches | pipeline |
| [zero]; [train] bucket_bytes; [precision] initial_scale, ... | zero |
| [recompute] modules, offload | recompute, recompute_offload |
| [precision] dtype | precision |
| [train] compile | the same |
| [train] micro_batch | num_microbatches; with a pipeline pipeline.num_microbatches |
| [optimizer] max_grad_norm | max_grad_norm |
"""

from __future__ import annotations

import math
from dataclasses import replace

from pyops.config.parallel_config import ParallelConfig
from pyops.config.run_sections import RunSections
from pyops.config.training_sections import PrecisionConfig
from pyops.parallel import ParallelPlan, PipelineOptions
from pyops.precision import PRECISIONS, LossScale

__all__ = ["loss_scale_of", "plan_for_run", "with_keys_of_a_run"]

ONE_RANK = ParallelConfig()
# What a plan calls them, and what a run does.
KEYS = {
    "ParallelPlan: recompute:": "recompute.modules:",
    "ParallelPlan: ": "parallel.",
    "PipelineOptions: ": "parallel.",
}


def plan_for_run(config: RunSections, *, num_rows: int) -> ParallelPlan:
    """How the ranks share the model of a run out.

    Args:
        config: Of the run.
        num_rows: Of a batch, for each copy of the model.

    Raises:
        ValueError: The rows can't be cut as [parallel] and [train] say.
    """
    parallel, options, precision = config.parallel, config.train, config.precision
    of_folder = config.model_folder.given
    micro_batch = min(options.micro_batch, num_rows)
    microbatches = parallel.cut(num_rows, micro_batch=micro_batch) if num_rows > 1 else 1
    pipeline = PipelineOptions()
    if parallel.pp > 1:
        pipeline = PipelineOptions(
            schedule=parallel.schedule,
            num_microbatches=microbatches,
            stages_per_rank=parallel.v,
            recompute=parallel.recompute,
            # A GPT's layers are called one by one, so that no forward of it gathers for all.
            gather_once=config.zero.stage == 3 and not of_folder,
        )
    scale = loss_scale_of(precision) if PRECISIONS[precision.dtype].scaled else None
    given = parallel if of_folder else ONE_RANK  # a GPT is made with its own way and order
    return ParallelPlan(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=parallel.dp,
        cp=parallel.cp,
        cp_method=given.cp_method,
        cp_order=given.cp_order,
        sequence_parallel=parallel.sequence_parallel,
        pipeline=pipeline,
        zero=replace(config.zero, bucket_bytes=options.bucket_bytes, loss_scale=scale),
        recompute=config.recompute.modules,
        recompute_offload=config.recompute.offload,
        precision=precision.dtype,
        num_microbatches=1 if parallel.pp > 1 else microbatches,
        compile=options.compile,
        # A limit of infinity never clips, but the norm is taken, which the metrics show.
        max_grad_norm=config.optimizer.max_grad_norm or math.inf,
    )


def loss_scale_of(options: PrecisionConfig) -> LossScale:
    """The loss scale's state machine; it stays at 1 where gradients need none.

    Args:
        options: [precision].
    """
    if not PRECISIONS[options.dtype].scaled:
        return LossScale(initial=1.0)
    return LossScale(
        initial=options.initial_scale,
        window=options.scale_window,
        hysteresis=options.hysteresis,
        minimum=options.minimum_scale,
    )


def with_keys_of_a_run(problem: Exception) -> str:
    """What `parallelize` says of a plan, with the key of the run's file in the place of the plan's
    field, where it begins with that.

    Args:
        problem: As it was raised.
    """
    text = str(problem)
    for field, key in KEYS.items():
        if text.startswith(field):
            return key + text.removeprefix(field)
    return text
