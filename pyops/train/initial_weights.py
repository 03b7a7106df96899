"""What a run takes over from an earlier one: FirstValues, what its layers begin with, one layer at
a time, so that a rank needs memory for its own alone; and the teacher that it learns from.

embedding     blocks.0 ... blocks.11     head
drawn by (seed, name), all of them
from a run that was trained before       stays as it was drawn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops.checkpoint import CheckpointError, Checkpoints, LazyTensor, load
from pyops.comm.agreement import on_first_rank
from pyops.config import Config, ConfigError, TaskConfig
from pyops.distill import ClassTeacher, freeze
from pyops.train.setup.state import read
from pyops.train.tasks import Task

__all__ = ["FirstValues", "class_teacher", "kept_layers", "weights_of"]

HEADS = ("head.", "pooler.", "next_sentence.")  # what a model may have had above its blocks
INPUTS = ("image_size", "num_channels", "num_labels", "vocab_size", "sequence_length")
SAME_DATA = {"masked_text", "passages"}  # tasks over one text, of which the same part is held out


def weights_of(folder: Path, *, task: Task) -> dict[str, LazyTensor]:
    """The model of a run's newest checkpoint, which stays on the disk.

    Raises:
        ConfigError: On every rank alike, where there is none, and where it may have learnt from
            what the task holds out.
    """
    weights: dict[str, LazyTensor] = _newest(folder, task=task, key="task.pretrained")["model"]
    return weights


def _newest(folder: Path, *, task: Task, key: str) -> Mapping[str, Any]:
    """The newest checkpoint of a run over numbered samples.

    Args:
        folder: Of the run.
        task: Of this run.
        key: Of the configuration, which names the folder.
    """
    latest = on_first_rank(Checkpoints(folder / "checkpoints").latest)
    if latest is None:
        raise ConfigError(
            f"{key} is {str(folder)!r}, where no checkpoint is in "
            f"{folder / 'checkpoints'}; name the folder of a run "
            'that was trained before, or set it to ""'
        )
    try:
        state: Mapping[str, Any] = load(latest, lazy=True, compare=True)[0]
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}") from None
    kind = state.get("task", {}).get("kind")
    if {kind, task.name} <= SAME_DATA and state.get("data") != task.digest:
        raise ConfigError(
            f"{key} is {str(folder)!r}, a run over other text, or another "
            "split of it, which may have learnt what is "
            "held out here; train it anew, with the same [data]"
        )
    return state


def class_teacher(config: Config, *, task: Task, device: torch.device) -> ClassTeacher:
    """The teacher of a run over images or passages: the model of another run of the same task.

    Args:
        config: With [distill].
        task: Of this run.
        device: Of the teacher.

    Raises:
        ConfigError: On every rank alike, for a run of another task, or of other inputs.
    """
    folder = Path(config.distill.teacher)
    state = _newest(folder, task=task, key="distill.teacher")
    of_run = state.get("task", {})
    if of_run.get("kind") != task.name:
        raise ConfigError(
            f"distill.teacher is {str(folder)!r}, a run of task.kind {of_run.get('kind')!r}, but "
            f"this one is of {task.name!r}; name a run of the same task"
        )
    section = TaskConfig(**of_run).section
    sizes = type(getattr(config, section))(**state["model_config"])
    own = getattr(config, config.task.section)
    for name in INPUTS:
        theirs, ours = getattr(sizes, name, None), getattr(own, name, None)
        if theirs != ours:
            raise ConfigError(
                f"distill.teacher is {str(folder)!r}, whose {section}.{name} is {theirs}, but "
                f"{config.task.section}.{name} is {ours} here; teacher and student need the same "
                "inputs"
            )
    model = freeze(task.model_like(sizes, seed=None, device=device, dtype=torch.float32))
    try:
        model.load_state_dict(read(state["model"]))
    except RuntimeError as error:
        raise ConfigError(f"distill.teacher is {str(folder)!r}: {error}") from None

    def logits_of(inputs: Tensor) -> Tensor:
        given = inputs.float() if inputs.is_floating_point() else inputs
        found: Tensor = model(given.to(device))
        return found

    return ClassTeacher(logits_of, samples=task.samples, config=config.distill.options)


def kept_layers(config: Config, *, task: Task) -> dict[str, LazyTensor]:
    """The weights of the teacher's layers that the student begins with, by the student's names.

    Args:
        config: With distill.keep.
        task: Of this run.

    Raises:
        ConfigError: On every rank alike, for a layer that the teacher lacks.
    """
    folder, keep = Path(config.distill.teacher), config.distill.keep
    weights = _newest(folder, task=task, key="distill.teacher")["model"]
    blocks = {int(name.split(".")[1]) for name in weights if name.startswith("blocks.")}
    if max(keep) not in blocks:
        raise ConfigError(
            f"distill.keep has layer {max(keep)}, but those of {folder} are 0 to {max(blocks)}"
        )
    found = {name: value for name, value in weights.items() if not name.startswith("blocks.")}
    for own, theirs in enumerate(keep):
        prefix = f"blocks.{theirs}."
        for name, value in weights.items():
            if name.startswith(prefix):
                found[f"blocks.{own}.{name.removeprefix(prefix)}"] = value
    return found


class FirstValues:
    """`ElasticCallbacks.initialize` of `Elastic`: called with a layer of `model` and its name.

    Args:
        model: On the meta device, or not.
        draw: Draws a module's own parameters, not its children's.
        weights: By name, in memory or in a checkpoint still; embedding and blocks begin with them.
        head: Whether the head does, too.
        key: Of the configuration, which named the weights.

    Raises:
        ConfigError: For a parameter that is not among the weights, or has another shape there, and
            for weights that the model lacks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        draw: Callable[[nn.Module], None],
        weights: Mapping[str, Tensor | LazyTensor] | None = None,
        head: bool = False,
        key: str = "task.pretrained",
    ) -> None:
        self._draw, self._weights, self._head = draw, weights or {}, head
        own = dict(model.named_parameters())
        for name in self._weights:
            if name not in own and not name.startswith(HEADS):
                raise ConfigError(
                    f"the weights of {key} have {name}, which this model "
                    "lacks; give a run of the same model"
                )
        for name, parameter in own.items() if weights is not None else ():
            if name.startswith("head.") and not head:
                continue
            if name not in self._weights:
                raise ConfigError(
                    f"the weights of {key} have no {name}; give a run of the "
                    "same model, with as many layers"
                )
            if (there := tuple(self._weights[name].shape)) != tuple(parameter.shape):
                raise ConfigError(
                    f"{name} is {there} in the weights of {key}, but "
                    f"{tuple(parameter.shape)} here; give the model "
                    "the same sizes"
                )

    def forget_weights(self) -> None:
        """Once all layers have theirs: what is called later gets its other values from ranks or
        from a checkpoint."""
        self._weights = {}

    @torch.no_grad()
    def __call__(self, name: str, layer: nn.Module) -> None:
        """Fill it."""
        for module in layer.modules():
            self._draw(module)
        taken = bool(self._weights) and (name != "head" or self._head)
        for own, parameter in layer.named_parameters() if taken else ():
            value = self._weights[f"{name}.{own}"]
            if isinstance(value, LazyTensor):
                value.read_into(parameter)
            else:
                parameter.copy_(value)
