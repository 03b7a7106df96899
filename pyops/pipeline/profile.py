"""profile: measure each layer of a model: forward, both parts of backward, bytes sent and kept.

    round 1   layer 0 forward, layer 1 forward, ... layer 1 backward, layer 0 backward       times: the median of all rounds
    round 2   ...

Layers run in turn, as they do in training, so each finds the caches as it will; the machine's slow moments hit all alike.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyops.pipeline.layer_costs import LayerCosts, Profile, Sizes

__all__ = ["profile"]

PARTS = ("forward", "backward", "input_gradient", "weight_gradient")


def profile(
    layers: Sequence[nn.Module], inputs: Any, *, loss: Callable[..., Tensor] | None = None, target: Any = None, rounds: int = 7,
    warmup: int = 2,
) -> Profile:  # fmt: skip
    """What each of `layers`, called one after the other, takes and keeps of one micro-batch.

    inputs: one micro-batch: what the first layer is called with, a tuple for several arguments. A layer that returns a tuple
        gives the next one several arguments. loss: called with the last layer's output, and with `target` if there is one;
        its time counts to the last layer. Without it the output's gradient is ones.
    rounds: how many of which the median is taken. warmup: rounds before them.

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
    last = modules[-1] if loss is None else _WithLoss(modules[-1], loss, target)
    called = [*modules[:-1], last]
    with _unchanged(modules, inputs):
        bytes_of = _bytes_of(called, inputs)
        samples: list[dict[str, list[float]]] = [{part: [] for part in PARTS} for _ in modules]
        for number in range(warmup + rounds):
            found = _round(called, inputs)
            if number >= warmup:
                for sample, times in zip(samples, found, strict=True):
                    for part, seconds in times.items():
                        sample[part].append(seconds)
    numbers = _Numbers()
    costs = [
        LayerCosts(
            name=type(module).__name__,
            forward=statistics.median(sample["forward"]),
            backward=statistics.median(sample["backward"]),
            input_gradient=statistics.median(sample["input_gradient"]),
            weight_gradient=statistics.median(sample["weight_gradient"]),
            parameters=sum(p.numel() for p in module.parameters()),
            weights=tuple((numbers.of(id(p)), p.numel() * p.element_size()) for p in module.parameters()),
            **sizes,
        )
        for module, sample, sizes in zip(modules, samples, bytes_of, strict=True)
    ]
    device = _device(modules, inputs)
    return Profile(tuple(costs), (("device", str(device)), ("threads", str(torch.get_num_threads())), ("rounds", str(rounds))))


class _WithLoss(nn.Module):
    """The last layer, and the loss behind it."""

    def __init__(self, layer: nn.Module, loss: Callable[..., Tensor], target: Any) -> None:
        super().__init__()
        self.layer, self.loss, self.target = layer, loss, target

    def forward(self, *args: Any) -> Tensor:
        output = self.layer(*args)
        return self.loss(output) if self.target is None else self.loss(output, self.target)


class _Numbers:
    """Small numbers for keys, in the order in which they come."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def of(self, key: int) -> int:
        return self.known.setdefault(key, len(self.known))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _detached(value: Any) -> Any:
    """The same value cut from its graph; tensors that had a gradient are leaves that want one."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value)(*map(_detached, value)) if hasattr(value, "_fields") else type(value)(map(_detached, value))
    return {key: _detached(each) for key, each in value.items()} if isinstance(value, dict) else value


def _call(layer: nn.Module, value: Any) -> Any:
    return layer(*value) if isinstance(value, tuple) else layer(value)


def _device(modules: Sequence[nn.Module], inputs: Any) -> torch.device:
    tensors = itertools.chain(*(module.parameters() for module in modules), _tensors(inputs))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


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


def _forward(layers: Sequence[nn.Module], inputs: Any, clock: _Clock) -> tuple[list[Any], list[Any], list[float]]:
    """(what each layer took, gave, and its seconds)."""
    taken, given, seconds = [], [], []
    value = inputs
    for layer in layers:
        taken.append(_detached(value))
        clock()
        value = _call(layer, taken[-1])
        seconds.append(clock())
        given.append(value)
    return taken, given, seconds


def _round(layers: Sequence[nn.Module], inputs: Any) -> list[dict[str, float]]:
    """Seconds of each part of each layer: once through with the backward in one, once with its parts."""
    clock = _Clock(_device(layers, inputs))
    found: list[dict[str, float]] = [{} for _ in layers]
    for parts in (("backward",), ("input_gradient", "weight_gradient")):
        taken, given, seconds = _forward(layers, inputs, clock)
        gradients: list[Tensor | None] | None = None
        for index in reversed(range(len(layers))):
            outputs = [t for t in _tensors(given[index]) if t.requires_grad]
            if gradients is None:
                gradients = [torch.ones_like(t) for t in outputs]
            wanted = [t for t in _tensors(taken[index]) if t.requires_grad]
            clock()
            if parts == ("backward",):
                _backward(outputs, gradients)
                found[index]["backward"] = clock()
                found[index]["forward"] = seconds[index]
            else:
                found[index]["input_gradient"] = _input_gradient(outputs, gradients, wanted, clock)
                _backward(outputs, gradients)
                found[index]["weight_gradient"] = max(0.0, found[index]["backward"] - found[index]["input_gradient"])
            gradients = [t.grad for t in wanted]
            given[index] = taken[index] = None
    return found


def _backward(outputs: list[Tensor], gradients: list[Tensor | None], **options: Any) -> None:
    pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs], **options)


def _input_gradient(outputs: list[Tensor], gradients: list[Tensor | None], wanted: list[Tensor], clock: _Clock) -> float:
    if not wanted:
        return 0.0
    clock()
    _backward(outputs, gradients, inputs=wanted, retain_graph=True)
    seconds = clock()
    for tensor in wanted:
        tensor.grad = None
    return seconds


def _bytes_of(layers: Sequence[nn.Module], inputs: Any) -> list[dict[str, Any]]:
    """Of each layer the storages that autograd saves, those of its input, and the bytes of its output.

    Nothing is freed until all layers have run, so that an address is one storage.
    """
    given_to_us = [inputs, *(layer.target for layer in layers if isinstance(layer, _WithLoss))]
    owned = (itertools.chain(layer.parameters(), layer.buffers()) for layer in layers)
    ours = {_address(tensor) for tensor in itertools.chain(_tensors(given_to_us), *owned)}
    numbers, found, held = _Numbers(), [], []
    value = inputs
    for index, layer in enumerate(layers):
        value = _detached(value)
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        taken = _sizes(_tensors(value), ours, numbers)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            given = _call(layer, value)
        outputs = list(_tensors(given))
        if not outputs:
            raise TypeError(
                f"layer {index} ({type(layer).__name__}) gave {type(given).__name__}, which has no tensor to send on; let it "
                "return a tensor, or a tuple with one"
            )
        found.append({"kept": _sizes(saved, ours, numbers), "taken": taken,
                      "activation": sum(t.numel() * t.element_size() for t in outputs)})  # fmt: skip
        held.append((value, given, saved))
        value = given
    return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sizes(tensors: Any, ours: set[int], numbers: _Numbers) -> Sizes:
    found = {_address(t): t.untyped_storage().nbytes() for t in tensors}
    return tuple((numbers.of(address), size) for address, size in found.items() if size and address not in ours)


@contextmanager
def _unchanged(modules: Sequence[nn.Module], inputs: Any) -> Iterator[None]:
    """Gradients, buffers, random states and the inputs' gradients are at the end what they are now."""
    parameters = [p for module in modules for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    before = [(p, p.grad, getattr(p, "main_grad", None)) for p in parameters]
    mains = [(main, main.detach().clone()) for _, _, main in before if isinstance(main, Tensor)]
    devices = [_device(modules, inputs)]
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), torch.enable_grad():
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
