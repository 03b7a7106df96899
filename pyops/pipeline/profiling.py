"""profile: measure each layer of a model: forward, backward and its parts, bytes sent and kept.

    round 1   layer 0 forward, layer 1 forward, ... layer 1 backward, layer 0 backward
    round 2   ...                                            times: the median of all rounds

Every layer is a stage of a pipeline in this process, whose one micro-batch goes through it twice:
once with a whole backward, once with deferred weight gradients. So layers run in turn, as they do
in training, each finds the caches as it will then, and slow moments of the machine hit all alike.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyops.comm.agreement import gather, ranks_agree
from pyops.mesh import ALONE, ProcessGroupLike, resolve
from pyops.pipeline.partition.layer_costs import LayerCosts, Profile, Sizes
from pyops.pipeline.runtime.microbatch import num_rows
from pyops.pipeline.runtime.pipeline import Pipeline
from pyops.pipeline.runtime.pipeline_config import PipelineConfig
from pyops.pipeline.runtime.skips import skip_pairs
from pyops.pipeline.runtime.stage import Loss, Stage, tensors_of
from pyops.pipeline.schedules.action import Action
from pyops.pipeline.schedules.names import custom

__all__ = ["profile"]

PARTS = {
    "forward": (False, "F"),
    "backward": (False, "B"),
    "forward_apart": (True, "F"),
    "input_gradient": (True, "I"),
    "weight_gradient": (True, "W"),
}


def profile(
    layers: Sequence[nn.Module],
    inputs: Any,
    *,
    loss: Loss | None = None,
    target: Any = None,
    named: Mapping[str, Any] | None = None,
    rounds: int = 7,
    warmup: int = 2,
    group: ProcessGroupLike = None,
) -> Profile:
    """The time and memory that each of `layers`, called one after the other as in a Pipeline, takes
    for one micro-batch.

    Runs on the layers' device, with as many threads as torch uses here. Inputs are constants,
    whether or not they require a gradient. Weights, gradients, buffers (batch statistics) and
    random states are afterwards what they were. Profile before wrapping parameters (data parallel,
    step in backward): their hooks would run. Bytes kept are those that autograd saves; what a
    custom function keeps otherwise is not seen.

    Args:
        layers: All layers of the model.
        inputs: The batch of one micro-batch, as in `Pipeline.step`.
        loss: As in Pipeline; its time counts to the last layer.
        target: Of the loss. Without a target the gradient of the last layer's output is ones.
        named: Named arguments of the layers, as in `Pipeline.step`.
        rounds: How many are measured; their median is taken.
        warmup: How many come before them.
        group: The ranks, each with all layers, that measure at the same time, as they will work;
            all get the mean of their times. None: the default group, or one process where
            torch.distributed is not initialized. `pyops.mesh.ALONE`: this process alone.

    Raises:
        ValueError: On every rank: no layers, none to train, no rounds, ranks with other layers.
        TypeError: On every rank: a layer whose output has no tensor.
    """

    def measure() -> Profile:
        run = _ProfileRun(list(layers), inputs, loss, target, dict(named or {}))
        return run.profile(rounds, warmup)

    if resolve(group, "profile") is None:
        return measure()
    gather(None, group=group)  # so that all begin together
    with ranks_agree(group):
        found = measure()
    several = gather(found, group=group)
    names = [layer.name for layer in found.layers]
    if any([layer.name for layer in each.layers] != names for each in several):
        raise ValueError("the ranks have different layers; each must profile the whole model")
    means = []
    for i, layer in enumerate(several[0].layers):
        seconds: dict[str, Any] = {
            part: statistics.fmean(getattr(each.layers[i], part) for each in several)
            for part in PARTS
        }
        means.append(replace(layer, **seconds))
    return replace(
        several[0], layers=tuple(means), facts=(*several[0].facts, ("ranks", str(len(several))))
    )


class _Numbering:
    """Small numbers for keys, in the order in which they come."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def of(self, key: int) -> int:
        return self.known.setdefault(key, len(self.known))


def _total(y: Any, _: Any) -> Tensor:
    several = [t.sum() for t in tensors_of(y) if t.requires_grad]
    return torch.stack(several).sum() if several else torch.zeros((), device="cpu")


class _ProfileRun:
    """The layers, and what they are called with."""

    def __init__(
        self,
        layers: list[nn.Module],
        inputs: Any,
        loss: Loss | None,
        target: Any,
        named: dict[str, Any],
    ) -> None:
        if not layers:
            raise ValueError(
                "there are no layers to profile; give the model's layers in the order in "
                "which they are called"
            )
        if not any(p.requires_grad for layer in layers for p in layer.parameters()):
            raise ValueError(
                "no parameter of the layers requires a gradient: there is nothing to train "
                "in a pipeline"
            )
        self.layers, self.named = layers, named
        self.inputs = tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, inputs
        )
        self.loss: Loss | None = _total if target is None else loss
        self.target: Any = (
            torch.zeros(num_rows(inputs) or 1, device="cpu") if target is None else target
        )
        self.device = next(
            (t.device for t in (*self.state(), *tensors_of(inputs))), torch.device("cpu")
        )
        self.skips = sorted(skip_pairs(layers).items())

    def state(self) -> Iterator[Tensor]:
        """Parameters and buffers."""
        return itertools.chain(
            *(itertools.chain(layer.parameters(), layer.buffers()) for layer in self.layers)
        )

    def pipeline(
        self, *, split: bool, before: Callable[[Stage, int], None] | None = None
    ) -> Pipeline:
        """Each layer a stage."""
        several = range(len(self.layers))
        order = [Action(i, "F", 0) for i in several]
        for i in reversed(several):
            order += [Action(i, "I", 0), Action(i, "W", 0)] if split else [Action(i, "B", 0)]
        made = Pipeline(
            self.layers,
            schedule=custom([order]),
            group=ALONE,
            loss=self.loss,
            config=PipelineConfig(boundaries=[*several, len(self.layers)], before_forward=before),
        )
        if self.device.type == "cuda":
            made.on_action(lambda _: torch.cuda.synchronize(self.device))
        return made

    def profile(self, rounds: int, warmup: int) -> Profile:
        if rounds < 1 or warmup < 0:
            raise ValueError(
                f"rounds is {rounds}, warmup {warmup}; expected 1 or more, and 0 or more"
            )
        with _unchanged(self.layers, self.device):
            sizes, skipped = self.bytes_of()
            samples = [self.round() for _ in range(warmup + rounds)][warmup:]
        numbers = _Numbering()
        costs = []
        for i, layer in enumerate(self.layers):
            seconds = {
                part: statistics.median(sample[i][part] for sample in samples) for part in PARTS
            }
            own = list(layer.parameters())
            weights = tuple((numbers.of(id(p)), p.numel() * p.element_size()) for p in own)
            fields: dict[str, Any] = {
                **seconds,
                **sizes[i],
                "parameters": sum(p.numel() for p in own),
                "weights": weights,
            }
            costs.append(LayerCosts(type(layer).__name__, **fields))
        facts = (
            ("device", str(self.device)),
            ("threads", str(torch.get_num_threads())),
            ("rounds", str(rounds)),
        )
        return Profile(tuple(costs), facts, skipped)

    def round(self) -> list[dict[str, float]]:
        """Seconds of each part of each layer."""
        found: list[dict[str, float]] = [{} for _ in self.layers]
        for split in (False, True):
            with _as_they_were(self.layers):
                made = self.pipeline(split=split)
                with made.recording() as timelines:
                    for _ in range(
                        2
                    ):  # the first finds the caches as making the pipeline left them
                        made.step(self.inputs, self.target, **self.named)
            for part, (apart, kind) in PARTS.items():
                for i in range(len(self.layers)) if apart == split else ():
                    begin, end = timelines[-1].actions[Action(i, kind, 0)]
                    found[i][part] = end - begin
        return found

    def bytes_of(self) -> tuple[list[dict[str, Any]], tuple[tuple[int, int, int], ...]]:
        """Of each layer the storages that autograd saves, those of its input, and the bytes of its
        output and put off; of each skip its layers and bytes.

        Nothing is freed until all layers have run forward, so that an address is one storage.
        """
        seen = [_LayerRecord(layer, i) for i, layer in enumerate(self.layers)]
        now: list[_LayerRecord] = []
        deferred_weight_grad: dict[int, int] = {}

        def look(action: Action) -> None:
            if action.kind == "I":
                deferred_weight_grad[action.stage] = made.stages[action.stage].deferred_bytes(0)

        def keep(tensor: Tensor) -> Tensor:
            if now:
                now[-1].saved.append(tensor)
            return tensor

        with _as_they_were(self.layers):
            made = self.pipeline(split=True, before=lambda stage, _: now.append(seen[stage.index]))
            made.on_action(look)
            hooks = [
                layer.register_forward_hook(one, with_kwargs=True)
                for layer, one in zip(self.layers, seen, strict=True)
            ]
            try:
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    made.step(self.inputs, self.target, **self.named)
            finally:
                for hook in hooks:
                    hook.remove()
        ours = {
            _address(t)
            for t in (*tensors_of([self.inputs, self.named, self.target]), *self.state())
        }
        numbers = _Numbering()
        found = [
            {
                "kept": _sizes(one.saved, ours, numbers),
                "taken": _sizes(one.taken, ours, numbers),
                "activation": one.activation,
                "deferred_weight_grad": deferred_weight_grad[i],
            }
            for i, one in enumerate(seen)
        ]
        return found, tuple((a, b, seen[a].stashed[name]) for name, (a, b) in self.skips)


class _LayerRecord:
    """A forward hook of a layer: what it took, gave and saved."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        self.index, self.stashes = index, tuple(getattr(layer, "stashes", ()))
        self.taken: list[Tensor] = []
        self.saved: list[Tensor] = []
        self.given: Any = None
        self.activation = 0
        self.stashed: dict[str, int] = {}

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any, given: Any) -> None:
        self.taken, self.given = tensors_of([args, kwargs]), given
        if self.stashes:
            self.stashed = {
                name: _nbytes(value)
                for name, value in zip(self.stashes, given[-len(self.stashes) :], strict=True)
            }
            given = given[: -len(self.stashes)]
        if not tensors_of(given):
            raise TypeError(
                f"layer {self.index} ({type(layer).__name__}) gave "
                f"{type(given).__name__}, which has no tensor to send on; let "
                "it return a tensor, or a tuple with one"
            )
        self.activation = _nbytes(given)


def _nbytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(value))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sizes(tensors: Iterable[Tensor], ours: set[int], numbers: _Numbering) -> Sizes:
    found = {_address(t): t.untyped_storage().nbytes() for t in tensors}
    return tuple(
        (numbers.of(address), size)
        for address, size in found.items()
        if size and address not in ours
    )


@contextmanager
def _as_they_were(layers: Sequence[nn.Module]) -> Iterator[None]:
    """The layers' forwards, and the marks of their parameters, are at the end what they are now."""
    modules = [module for layer in layers for module in layer.modules()]
    plain = [module for module in modules if "forward" not in module.__dict__]
    marks = [(p, getattr(p, "deferred", None)) for layer in layers for p in layer.parameters()]
    try:
        yield
    finally:
        for module in plain:
            module.__dict__.pop("forward", None)
        for p, queue in marks:
            if queue is not None:
                p.deferred = queue  # type: ignore[attr-defined]
            elif hasattr(p, "deferred"):
                del p.deferred


@contextmanager
def _unchanged(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Gradients, buffers and random states are at the end what they are now."""
    parameters = [p for module in modules for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    before = [(p, p.grad, getattr(p, "main_grad", None)) for p in parameters]
    mains = [(main, main.detach().clone()) for _, _, main in before if isinstance(main, Tensor)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        try:
            yield
        finally:
            for p, grad, _ in before:
                p.grad = grad
            with torch.no_grad():
                for tensor, was in [*buffers, *mains]:
                    tensor.copy_(was)
