"""What a run whose ranks are replicas does not go with."""

from __future__ import annotations

from pyops.config.run_sections import RunSections
from pyops.config.training_sections import DOWNPOUR

__all__ = ["check_asynchronous"]


def check_asynchronous(config: RunSections) -> None:
    """ValueError for what [asynchronous] does not go with, naming the key."""
    if not config.asynchronous.on:
        return
    method = f"asynchronous.method is {config.asynchronous.method!r}, whose ranks are replicas"
    if config.task.kind != "text" or config.elastic.on or config.model_folder.given:
        raise ValueError(
            f"{method} of a GPT that is trained on text; leave out task.kind, [elastic] and "
            'model.folder, or set asynchronous.method to "none"'
        )
    parallel = config.parallel
    for key, value, off in (
        ("zero.stage", config.zero.stage, 0),
        *((f"parallel.{axis}", getattr(parallel, axis), 1) for axis in ("tp", "pp", "cp")),
        ("parallel.adapt", parallel.adapt, False),
    ):
        if value != off:
            raise ValueError(
                f"{method} of one process each, but {key} is {value}; set it to "
                f"{str(off).lower()}, or use pyops.local_sgd in a script of your own"
            )
    if config.optimizer.communicates:
        raise ValueError(
            f"{method} that step on their own, but optimizer.name {config.optimizer.name!r} "
            "communicates at each step: set it to adamw, say"
        )
    if config.communication.codec != "none":
        raise ValueError(
            f"{method} that send no gradients, but communication.codec is "
            f'{config.communication.codec!r}: set it to "none", and asynchronous.codec'
        )
    if config.asynchronous.method == DOWNPOUR:
        _check_downpour(config, method)
    if config.precision.dtype == "fp16":
        raise ValueError(
            f'{method} with a loss scale each, but precision.dtype is "fp16": set it to bf16'
        )


def _check_downpour(config: RunSections, method: str) -> None:
    """What shards, which hold parts of layers, do not go with."""
    optimizer, train = config.optimizer, config.train
    if optimizer.name in ("lamb", "lars", "adafactor"):
        raise ValueError(
            f"{method} and hold shards of a vector, but optimizer.name {optimizer.name!r} goes by "
            "the norms of whole layers: set it to adagrad, say"
        )
    if optimizer.weight_decay:
        raise ValueError(
            f"{method} and hold shards of a vector, in which weights and biases are not told "
            f"apart, but optimizer.weight_decay is {optimizer.weight_decay:g}: set it to 0"
        )
    if config.precision.dtype != "fp32":
        raise ValueError(
            f"{method} and hold shards in fp32, but precision.dtype is "
            f"{config.precision.dtype!r}: set it to fp32"
        )
    warm = config.asynchronous.warm_start
    for key in ("validate_every", "checkpoint_every"):
        if 0 < (every := getattr(train, key)) < warm:
            raise ValueError(
                f"asynchronous.warm_start is {warm}, but the replicas meet after train.{key} = "
                f"{every} steps; give a warm start of at most so many"
            )
