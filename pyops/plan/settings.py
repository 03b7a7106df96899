"""A layout as what runs it: a ParallelPlan, the sections of a TOML file, Python, text.

parallel_plan(Layout(tp=2, dp=4, zero=1))  -> ParallelPlan(tp=2, dp=4, zero=ZeroConfig(stage=1))
sections(...)                              -> {"parallel": {"tp": 2, ...}, "zero": {"stage": 1}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pyops.comm.compression.names import parse
from pyops.parallel import ParallelPlan, PipelineOptions
from pyops.plan.layout import SEVERAL_STAGES, Layout
from pyops.plan.shapes import PlanError
from pyops.zero import ZeroConfig

__all__ = ["BLOCKS", "as_python", "codec_code", "parallel_plan", "sections", "toml_text"]

BLOCKS = "blocks.*"
"""The names of the blocks of a GPT of pyops."""


def parallel_plan(layout: Layout, *, precision: str, blocks: str = BLOCKS) -> ParallelPlan:
    """What `pyops.parallel.parallelize` takes.

    Args:
        layout: How ranks share the model.
        precision: "fp32", "bf16" or "fp16".
        blocks: The names of the model's blocks, where these are computed again.

    Raises:
        PlanError: The gradients of the layout travel compressed, which is no part of a plan.
    """
    if layout.codec != "none":
        raise PlanError(
            f"codec is {layout.codec!r}, which a ParallelPlan has not; train with pyops train and "
            f"the plan's TOML file, or with DataParallel(model, codec={codec_code(layout.codec)})"
        )
    pipeline = PipelineOptions()
    if layout.pp > 1:
        pipeline = PipelineOptions(
            schedule=layout.schedule,
            num_microbatches=layout.num_microbatches,
            stages_per_rank=(layout.stages_per_rank if layout.schedule in SEVERAL_STAGES else 1),
        )
    return ParallelPlan(
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        pipeline=pipeline,
        zero=ZeroConfig(stage=layout.zero, offload=layout.offload),
        recompute=recomputed_modules(layout, blocks),
        precision=precision,
        num_microbatches=layout.num_microbatches if layout.pp == 1 else 1,
    )


def codec_code(name: str) -> str:
    """A codec of `pyops.comm` as Python.

    Args:
        name: Of `pyops.plan.layout.CODECS`.
    """
    return f"{type(parse(name)).__name__}()"


def recomputed_modules(layout: Layout, blocks: str) -> tuple[str, ...]:
    """The names of the modules that are computed again.

    Args:
        layout: Which says what.
        blocks: The names of the model's blocks.
    """
    names = {"none": (), "attention": (f"{blocks}.attention.core",), "block": (blocks,)}
    return names[layout.recompute]


def sections(layout: Layout, *, precision: str, blocks: str = BLOCKS) -> dict[str, dict[str, Any]]:
    """The sections of a run's TOML file that a layout fills.

    Args:
        layout: How ranks share the model.
        precision: "fp32", "bf16" or "fp16".
        blocks: The names of the model's blocks, where these are computed again.
    """
    parallel: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    if layout.cp > 1:
        parallel |= {"cp": layout.cp, "cp_method": layout.cp_method}
    if layout.sequence_parallel:
        parallel["sequence_parallel"] = True
    train: dict[str, Any] = {"batch": layout.batch}
    if layout.pp > 1:
        parallel["schedule"] = layout.schedule
        parallel["num_microbatches"] = layout.num_microbatches
        if layout.schedule in SEVERAL_STAGES:
            parallel["v"] = layout.stages_per_rank
    else:
        train["micro_batch"] = layout.micro_batch
    found: dict[str, dict[str, Any]] = {
        "parallel": parallel,
        "zero": {"stage": layout.zero},
        "precision": {"dtype": precision},
        "train": train,
    }
    if layout.offload != "none":
        found["zero"]["offload"] = layout.offload
    if layout.codec != "none":
        found["communication"] = {"codec": layout.codec}
    if layout.recompute != "none":
        found["recompute"] = {"modules": list(recomputed_modules(layout, blocks))}
    return found


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML.

    Args:
        tables: {section: {key: value}}.
    """
    texts = []
    for name, values in tables.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        texts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(texts) + "\n"


def as_python(value: Any) -> str:
    """A dataclass as a call, with the fields that differ from their defaults.

    Args:
        value: The dataclass, or a value of one of its fields.
    """
    if not is_dataclass(value):
        return repr(value)
    kind: Any = type(value)
    usual = kind()
    given = {
        field.name: getattr(value, field.name)
        for field in fields(value)
        if getattr(value, field.name) != getattr(usual, field.name)
    }
    inside = ", ".join(f"{name}={as_python(each)}" for name, each in given.items())
    return f"{kind.__name__}({inside})"
