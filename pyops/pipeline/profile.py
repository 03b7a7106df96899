"""profile: measure each layer of a model: forward, backward and its parts, bytes sent and kept.

    round 1   layer 0 forward, layer 1 forward, ... layer 1 backward, layer 0 backward       times: the median of all rounds
    round 2   ...

Layers run in turn, as they do in training, so each finds the caches as it will; the machine's slow moments hit all alike. Each
is a stage of its own and called as a pipeline calls it: every round once with the backward in one, once with weight gradients
put off.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pyops import deferred
from pyops.pipeline.layer_costs import LayerCosts, Profile, Sizes
from pyops.pipeline.stage import Stage, detached

__all__ = ["profile"]

PARTS = ("forward", "backward", "forward_apart", "input_gradient", "weight_gradient")


def profile(
    layers: Sequence[nn.Module], inputs: Any, *, loss: Callable[[Any, Any], Tensor] | None = None, target: Any = None,
    named: Mapping[str, Any] | None = None, rounds: int = 7, warmup: int = 2,
) -> Profile:  # fmt: skip
    """What each of `layers`, called one after the other as in a Pipeline, takes and keeps of one micro-batch.

    inputs: one micro-batch: what the first layer is called with, a tuple for several arguments. loss, target: called with the
        last layer's output; its time counts to the last layer. Without them the output's gradient is ones. named: arguments of
        the layers that name them. rounds: how many of which the median is taken. warmup: rounds before them.

    Runs on the layers' device, with as many threads as torch uses here. Weights, gradients, buffers (batch statistics) and
    random states are afterwards what they were. Profile before wrapping parameters (data parallel, step in backward): their
    hooks would run. Bytes kept are those that autograd saves; what a custom function keeps otherwise is not seen.

    ValueError: no layers, no rounds. TypeError: a layer whose output has no tensor.
    """
    modules = list(layers)
    if not modules:
        raise ValueError("there are no layers to profile; give the model's layers in the order in which they are called")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds is {rounds}, warmup {warmup}; expected 1 or more, and 0 or more")
    last = len(modules) - 1
    run = _Run([Stage(i, [layer], first=i, loss=loss if i == last else None) for i, layer in enumerate(modules)],
               inputs, dict(named or {}), target, _device(modules, inputs))  # fmt: skip
    with _unchanged(modules, run.device):
        sizes = run.bytes_of()
        samples = [run.round() for _ in range(warmup + rounds)][warmup:]
    numbers = _Numbers()
    costs = []
    for i, layer in enumerate(modules):
        seconds = {part: statistics.median(sample[i][part] for sample in samples) for part in PARTS}
        parameters = list(layer.parameters())
        weights = tuple((numbers.of(id(p)), p.numel() * p.element_size()) for p in parameters)
        fields: dict[str, Any] = {**seconds, **sizes[i], "parameters": sum(p.numel() for p in parameters), "weights": weights}
        costs.append(LayerCosts(type(layer).__name__, **fields))
    facts = (("device", str(run.device)), ("threads", str(torch.get_num_threads())), ("rounds", str(rounds)))
    return Profile(tuple(costs), facts)


class _Numbers:
    """Small numbers for keys, in the order in which they come."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def of(self, key: int) -> int:
        return self.known.setdefault(key, len(self.known))


class _Clock:
    """Seconds since the last call, all work of the device included."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, 0.0
        self()

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self.last = self.last, time.perf_counter()
        return self.last - before


class _Run:
    """The stages, and what they are called with."""

    def __init__(self, stages: list[Stage], inputs: Any, named: dict[str, Any], target: Any, device: torch.device) -> None:
        self.stages, self.inputs, self.named, self.target, self.device = stages, inputs, named, target, device
        self.layers = [layer for stage in stages for layer in stage.layers]

    def target_of(self, stage: Stage) -> Any:
        return self.target if stage is self.stages[-1] else None

    def round(self) -> list[dict[str, float]]:
        """Seconds of each part of each layer."""
        found: list[dict[str, float]] = [{} for _ in self.stages]
        clock = _Clock(self.device)
        self.forward(clock, found, "forward")
        gradients = self.gradients
        for stage, times in zip(reversed(self.stages), reversed(found), strict=True):
            clock()
            gradients = stage.backward(0, gradients)
            times["backward"] = clock()
        with _put_off(self.stages):
            self.forward(clock, found, "forward_apart")
            gradients = self.gradients
            for stage, times in zip(reversed(self.stages), reversed(found), strict=True):
                clock()
                gradients = stage.inputs(0, gradients)
                times["input_gradient"] = clock()
                stage.weights(0)
                times["weight_gradient"] = clock()
        return found

    def forward(self, clock: _Clock, found: list[dict[str, float]], part: str) -> None:
        value = self.inputs
        for stage, times in zip(self.stages, found, strict=True):
            taken = detached(value)
            clock()
            value = stage.forward(0, taken, self.named, self.target_of(stage))
            times[part] = clock()
        self.gradients: Any = [torch.ones_like(t) for t in _tensors(value) if t.requires_grad]

    def bytes_of(self) -> list[dict[str, Any]]:
        """Of each layer the storages that autograd saves, those of its input, and the bytes of its output; bytes put off.

        Nothing is freed until all layers have run, so that an address is one storage.
        """
        owned = (itertools.chain(layer.parameters(), layer.buffers()) for layer in self.layers)
        ours = {_address(t) for t in itertools.chain(_tensors([self.inputs, self.named, self.target]), *owned)}
        numbers, held = _Numbers(), []
        found: list[dict[str, Any]] = []
        value = self.inputs
        for stage in self.stages:
            value = detached(value)
            saved: list[Tensor] = []

            def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(tensor)
                return tensor

            taken = _sizes(_tensors(value), ours, numbers)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                given = stage.forward(0, value, self.named, self.target_of(stage))
            outputs = _tensors(given)
            if not outputs:
                raise TypeError(
                    f"layer {stage.index} ({type(stage.layers[0]).__name__}) gave {type(given).__name__}, which has no tensor "
                    "to send on; let it return a tensor, or a tuple with one"
                )
            found.append({"kept": _sizes(saved, ours, numbers), "taken": taken,
                          "activation": sum(t.numel() * t.element_size() for t in outputs)})  # fmt: skip
            held.append((value, given, saved))
            value = given
        for stage in self.stages:
            stage.forget()
        with _put_off(self.stages) as queues:
            self.forward(_Clock(self.device), [{} for _ in self.stages], "forward")
            gradients = self.gradients
            for stage, queue, sizes in zip(reversed(self.stages), reversed(queues), reversed(found), strict=True):
                with queue.collecting():
                    gradients = stage.backward(0, gradients)
                sizes["put_off"] = queue.take().nbytes
        return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _device(modules: Sequence[nn.Module], inputs: Any) -> torch.device:
    tensors = itertools.chain(*(module.parameters() for module in modules), _tensors(inputs))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sizes(tensors: Iterable[Tensor], ours: set[int], numbers: _Numbers) -> Sizes:
    found = {_address(t): t.untyped_storage().nbytes() for t in tensors}
    return tuple((numbers.of(address), size) for address, size in found.items() if size and address not in ours)


@contextmanager
def _put_off(stages: Sequence[Stage]) -> Iterator[list[deferred.Deferred]]:
    """Within, the stages can put weight gradients off; the queues. Afterwards layers and marks are as before."""
    modules = [module for stage in stages for layer in stage.layers for module in layer.modules()]
    parameters = [p for stage in stages for layer in stage.layers for p in layer.parameters()]
    plain = [module for module in modules if "forward" not in module.__dict__]
    marks = [(p, getattr(p, "deferred", None)) for p in parameters]
    for stage in stages:
        stage.defer()
    try:
        yield [deferred.Deferred(p for layer in stage.layers for p in layer.parameters()) for stage in stages]
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
