"""Which runs take replacements for ranks that die."""

from __future__ import annotations

from pyops.config.run_sections import RunSections
from pyops.healing.zero import check_healable

__all__ = ["check_healing"]


def check_healing(config: RunSections) -> None:
    """ValueError for what [healing] does not go with, naming the key."""
    every = config.healing.copy_every
    if not config.healing.on:
        return
    takes = f"healing.copy_every is {every}, which takes"
    if config.task.kind != "text" or config.elastic.on or config.model_folder.given:
        raise ValueError(
            f"{takes} a GPT that is trained on text; leave out task.kind, [elastic] and "
            "model.folder, or set it to 0"
        )
    parallel, train = config.parallel, config.train
    for key, value, off in (
        ("asynchronous.method", config.asynchronous.method, "none"),
        *((f"parallel.{axis}", getattr(parallel, axis), 1) for axis in ("tp", "pp", "cp")),
        ("parallel.adapt", parallel.adapt, False),
        ("communication.codec", config.communication.codec, "none"),
        ("train.memory_checkpoint_every", train.memory_checkpoint_every, 0),
    ):
        if value != off:
            raise ValueError(
                f"{takes} ranks that hold the same model and take each step together, but {key} is "
                f"{value!r}; set {key} to {_as_toml(off)}, or healing.copy_every to 0"
            )
    if config.optimizer.communicates:
        raise ValueError(
            f"{takes} optimizers that do not communicate by themselves, but optimizer.name is "
            f"{config.optimizer.name!r}; set it to adamw, say, or healing.copy_every to 0"
        )
    if config.data.kind == "python":
        raise ValueError(
            f'{takes} data whose place is the same on every rank, but data.kind is "python"; set '
            'it to "text" or "tokens", or healing.copy_every to 0'
        )
    if train.device == "cuda":
        raise ValueError(
            f'{takes} process groups of Gloo alone, but train.device is "cuda"; set it to "cpu", '
            "or healing.copy_every to 0"
        )
    check_healable(config.zero, f"{takes} states that lie beside whole parameters: zero.")


def _as_toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
