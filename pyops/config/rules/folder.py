"""What a run that trains a Hugging Face folder does not go with."""

from __future__ import annotations

import json
from typing import Any

from pyops.config.config_error import ConfigError
from pyops.config.run_plan import plan_for_run
from pyops.config.run_sections import RunSections
from pyops.config.task_config import TaskConfig

__all__ = ["check_folder"]

WHOLE_LAYERS = ("lamb", "lars", "adafactor")


def check_folder(config: RunSections) -> None:
    """Refuse what a run that trains a folder does not go with.

    Raises:
        ConfigError: An option has another value than such a run takes.
    """
    optimizer, parallel = config.optimizer, config.parallel
    task = TaskConfig()
    rules: list[tuple[str, Any, Any, str]] = [
        ("task.kind", config.task.kind, task.kind, "has its own task"),
        ("task.pretrained", config.task.pretrained, task.pretrained, "begins with its weights"),
        ("task.num_epochs", config.task.num_epochs, task.num_epochs, "takes train.num_steps"),
        ("task.num_copies", config.task.num_copies, task.num_copies, "has no copies"),
        ("elastic.freeze", config.elastic.freeze, "none", "freezes nothing"),
        ("data.tokenizer", config.data.tokenizer, "bytes", "has a tokenizer of its own"),
        (
            "optimizer.name",
            optimizer.name,
            "adamw" if optimizer.communicates else optimizer.name,
            "has no optimizer that communicates itself",
        ),
        ("optimizer.layer_decay", optimizer.layer_decay, 1.0, "has one learning rate"),
        ("communication.codec", config.communication.codec, "none", "compresses no gradients"),
        ("recompute.offload", config.recompute.offload, "none", "keeps inputs on the device"),
        ("parallel.adapt", parallel.adapt, False, "has the layout that is written down"),
        ("train.algorithm", config.train.algorithm, "auto", "chooses the all-reduce itself"),
    ]
    if parallel.tp > 1 and optimizer.name in WHOLE_LAYERS:
        why = f"can't take sums over layers of which parallel.tp {parallel.tp} leaves a rank a part"
        rules.append(("optimizer.name", optimizer.name, "adamw", why))
    if parallel.tp == 1:
        why = "shares tokens among the ranks of parallel.tp, which is 1"
        rules.append(("parallel.sequence_parallel", parallel.sequence_parallel, False, why))
    if config.distill.on:
        rules += _taught_rules(config)
    for key, value, taken, why in rules:
        if value != taken:
            raise ConfigError(
                f"{key} is {json.dumps(value)}, but model.folder is {config.model_folder.folder!r}:"
                f" a run that trains a folder {why}; set it to {json.dumps(taken)}"
            )
    try:
        plan_for_run(config, num_rows=1).validate()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.folder with these sections: {error}") from None


def _taught_rules(config: RunSections) -> list[tuple[str, Any, Any, str]]:
    """(key, its value, the value that is taken, why a run with a teacher takes no other)."""
    parallel, distill = config.parallel, config.distill
    loss = "with distill.teacher has its loss in the last layer, of all tokens of a row,"
    rules: list[tuple[str, Any, Any, str]] = [
        ("parallel.cp", parallel.cp, 1, f"{loss} which cp shares out"),
        ("parallel.sequence_parallel", parallel.sequence_parallel, False, f"{loss} on each rank"),
    ]
    if parallel.pp > 1:
        why = "compares hidden states on one rank, but parallel.pp is above 1"
        rules.append(("distill.hidden", distill.hidden, 0.0, why))
    if config.adapter.rank:
        why = "trains adapters of all of its layers ([adapter])"
        rules.append(("distill.keep", distill.keep, (), why))
    return rules
