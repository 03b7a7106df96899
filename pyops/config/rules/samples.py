"""What a run over numbered samples, and one that freezes layers, does not go with.

| option | over samples | with elastic.freeze |
|---|---|---|
| ZeRO, a codec, compiled models | refused | refused |
| tensor parallelism | refused, but on a grid (`rules.grids`) | refused |
| micro-batches, recomputing, fp16, other schedules | refused when the run begins | not judged |
| a head tied to the embedding, several stages of a rank | not judged | refused |
"""

from __future__ import annotations

import json
from typing import Any

from pyops.config.config_error import ConfigError
from pyops.config.run_sections import RunSections
from pyops.precision import PRECISIONS

__all__ = ["check_elastic", "check_norm", "check_samples", "check_taught"]

LAYOUT = "which a change of layout does not carry over"
SCHEDULES = ("1f1b", "gpipe")
CLASSIFYING = ("digits", "characters", "passages")


def _shared_rules(config: RunSections) -> tuple[tuple[str, Any, Any, str], ...]:
    """(key, its value, the value that is taken, why a run that freezes layers takes no other)."""
    optimizer = config.optimizer
    return (
        ("zero.stage", config.zero.stage, 0, f": it shares out states, {LAYOUT}"),
        ("parallel.tp", config.parallel.tp, 1, f": it cuts layers, {LAYOUT}"),
        (
            "train.compile",
            config.train.compile,
            False,
            ": each change of layout would compile anew",
        ),
        (
            "optimizer.name",
            optimizer.name,
            "adamw" if optimizer.communicates else optimizer.name,
            f": it communicates, and keeps errors, {LAYOUT}",
        ),
        ("communication.codec", config.communication.codec, "none", f", {LAYOUT}"),
    )


def check_samples(config: RunSections) -> None:
    """Refuse what a run over numbered samples does not have; to be called with the layout that the
    ranks were given.

    Raises:
        ConfigError: An option has another value than such a run takes.
    """
    parallel, dtype = config.parallel, config.precision.dtype
    rules = [
        *(
            (key, value, taken)
            for key, value, taken, _ in _shared_rules(config)
            if key != "parallel.tp" or parallel.grid == "1d"
        ),
        ("parallel.num_microbatches", parallel.num_microbatches, 0),
        ("parallel.recompute", parallel.recompute, "never"),
        (
            "parallel.schedule",
            parallel.schedule,
            parallel.schedule if parallel.schedule in SCHEDULES else SCHEDULES[0],
        ),
        ("train.micro_batch", config.train.micro_batch, 0),
        ("recompute.modules", config.recompute.modules, ()),
        ("precision.dtype", dtype, "bf16" if PRECISIONS[dtype].scaled else dtype),
    ]
    for key, value, taken in rules:
        if value != taken:
            raise ConfigError(
                f"{key} is {json.dumps(value)}, which a run over numbered samples (task.kind "
                f"{config.task.kind!r}) does not have; set it to {json.dumps(taken)}"
            )


def check_elastic(config: RunSections) -> None:
    """Refuse what a run that freezes layers does not go with.

    Raises:
        ValueError: An option has another value than such a run takes.
    """
    parallel, tied = config.parallel, config.task.kind == "text" and config.model.tied_head
    several = parallel.num_stages != parallel.pp
    rules = [
        *_shared_rules(config),
        ("recompute.offload", config.recompute.offload, "none", f", {LAYOUT}"),
        (
            "parallel.schedule",
            parallel.schedule,
            "1f1b" if several else parallel.schedule,
            f", which has {parallel.num_stages} stages on {parallel.pp} ranks, but ranks are "
            "halved; leave parallel.v at 1",
        ),
        (
            "model.tied_head",
            tied,
            False,
            ": the head goes on training, but has the weights of the embedding, which is frozen",
        ),
    ]
    for key, value, taken, why in rules:
        if value != taken:
            shown = repr(value) if isinstance(value, str) else json.dumps(value)
            raise ValueError(
                f"elastic.freeze is {config.elastic.freeze!r}, but {key} is {shown}{why}; set "
                f'{key} to {json.dumps(taken)}, or elastic.freeze to "none"'
            )


def check_taught(config: RunSections) -> None:
    """Refuse what a run without a folder does not go with where it has a teacher.

    Raises:
        ValueError: An option has another value than such a run takes.
    """
    distill, kind = config.distill, config.task.kind
    if kind not in CLASSIFYING:
        raise ValueError(
            f"distill.teacher is {distill.teacher!r}, but task.kind is {kind!r}: of runs without "
            f"model.folder those learn from a teacher whose task.kind is one of "
            f"{', '.join(CLASSIFYING)}; leave [distill] out, or name a folder in [model]"
        )
    if (cp := config.parallel.cp) > 1:
        raise ValueError(
            f"parallel.cp is {cp}, with which ranks share out the tokens of a sample, but "
            f"distill.teacher is {distill.teacher!r}, which is asked about whole ones; set it to 1"
        )
    if distill.hidden:
        raise ValueError(
            f"distill.hidden is {distill.hidden}, but task.kind is {kind!r}, which learns from its "
            "teacher's logits alone; set it to 0"
        )
    if distill.keep and config.task.pretrained:
        raise ValueError(
            f"distill.keep is {list(distill.keep)}, layers of the teacher that the student begins "
            f"with, but task.pretrained is {config.task.pretrained!r}; leave one of them out"
        )
    if distill.keep and len(distill.keep) != (
        layers := getattr(config, config.task.section).num_layers
    ):
        raise ValueError(
            f"distill.keep has {len(distill.keep)} layers, but {config.task.section}.num_layers is "
            f"{layers}; set it to {len(distill.keep)}"
        )


def check_norm(config: RunSections, *, ranks: int) -> None:
    """ConfigError for a norm over the images of a batch where ranks share them out: each would
    keep other running statistics."""
    norm = config.coatnet.norm
    if config.task.section == "coatnet" and ranks > 1 and norm != "layer":
        raise ConfigError(
            f"coatnet.norm is {norm!r}, whose statistics are of the images of a rank, but there "
            f'are {ranks} ranks; set it to "layer", or start one process'
        )
