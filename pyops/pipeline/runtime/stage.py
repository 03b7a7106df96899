"""Stage: neighbouring layers on one device, and what they keep of every micro-batch between its
forward and its backward.

    forward(m, x)    x -> layers -> y            keeps the leaves of x and where y's graph begins
    backward(m, g)   gradients of y -> gradients of the leaves of x, and of the weights
    inputs(m, g)     the gradients of x alone; the products that make the weights' are put off until weights(m)
    again(m)         forward a second time, where the first kept x alone; same random numbers

Gradients are those of torch.autograd, micro-batch by micro-batch in the order of the calls: added
to what is in `.grad`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map

from pyops import random
from pyops.deferred import Deferred, linears
from pyops.pipeline.runtime.skips import SkipEdges, SkipTensors, StageSkips, stage_skips
from pyops.random import RandomStates

__all__ = ["Stage", "detached", "named_arguments", "tensors_of"]

Loss = Callable[[Any, Any], Tensor]


class SavedGraph(NamedTuple):
    """What a backward needs. leaves: of x, which get gradients. roots: where y's graph begins, None
    for what has none."""

    leaves: list[Tensor]
    roots: list[Any]


class RecomputeInputs(NamedTuple):
    """What a second forward needs: the arguments, the random states of the first, and whether its
    results want gradients."""

    x: Any
    named: dict[str, Any]
    target: Any
    dropout: Any
    seeds: RandomStates
    trained: bool


class Stage:
    """Stage `index` of the pipeline: `layers`, of which the first is the model's number `first`.

    Layers are called one after the other with what the one before returned, a tuple as several
    arguments; named arguments go to those whose forward names them. loss: on the last stage, (what
    the last layer returned, target) -> a scalar tensor. edges: the names of what skips stages, for
    each edge of the pipeline. Where this stage has some, x and y are `SkipTensors`.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        *,
        first: int,
        loss: Loss | None = None,
        edges: SkipEdges | None = None,
    ) -> None:
        self.index, self.layers, self.first, self.loss = index, list(layers), first, loss
        self.skips = stage_skips(self.layers, index, edges or {})
        self.accepted = [named_arguments(layer) for layer in self.layers]
        self.recomputing = False
        self._works_in_place = any(
            getattr(m, "inplace", False) is True for layer in self.layers for m in layer.modules()
        )
        self._graphs: dict[int, SavedGraph] = {}
        self._recompute_inputs: dict[int, RecomputeInputs] = {}
        self._deferred_weight_grads: dict[int, Any] = {}
        self._queue: Deferred | None = None

    def defer(self) -> None:
        """Let the weight gradients of linear layers be computed apart."""
        for layer in self.layers:
            linears(layer)
        self._queue = Deferred(p for layer in self.layers for p in layer.parameters())

    @property
    def kept(self) -> int:
        """How many micro-batches are between forward and backward."""
        return len(self._graphs.keys() | self._recompute_inputs.keys())

    def forget(self) -> None:
        """Let go of everything that is kept for a backward."""
        self._graphs.clear()
        self._recompute_inputs.clear()
        self._deferred_weight_grads.clear()

    def close(self) -> None:
        """Let go of what is kept, and take off the parameters what puts their gradients off."""
        self.forget()
        if self._queue is not None:
            self._queue.release()

    def forward(
        self, number: int, x: Any, named: dict[str, Any], target: Any, *, recompute: bool = False
    ) -> Any:
        """y of micro-batch `number`; on the last stage its loss. recompute: keep x alone, for
        `again`."""
        if not recompute:
            y = self.call(x, named, target)
            self._keep(number, x, y, [t.requires_grad for t in tensors_of(y)])
            return y
        wants = any(t.requires_grad for t in tensors_of(x))
        trained = wants or any(p.requires_grad for layer in self.layers for p in layer.parameters())
        dropout = [each for layer in self.layers for each in random.states_of(layer)]
        self._recompute_inputs[number] = RecomputeInputs(
            x, named, target, dropout, RandomStates(cuda_devices_of(x)), trained
        )
        with torch.no_grad():
            y = self.call(x, named, target)
        return tree_map(_wanting_gradient, y) if trained else y

    def call(self, x: Any, named: dict[str, Any], target: Any) -> Any:
        """The layers, and the loss where there is a target."""
        if (
            self._works_in_place
        ):  # not on what is a leaf, or kept for a second forward, or another stage's as well
            x = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)
        if self.skips is not None:
            return self._call_with_skips(self.skips, x, named, target)
        for layer, accepted in zip(self.layers, self.accepted, strict=True):
            some = (
                {name: value for name, value in named.items() if name in accepted}
                if named
                else named
            )
            x = layer(*x, **some) if type(x) is tuple else layer(x, **some)
        return self.loss(x, target) if self.loss is not None and target is not None else x

    def _call_with_skips(
        self, skips: StageSkips, x: Any, named: dict[str, Any], target: Any
    ) -> Any:
        held: dict[str, Any] = {}
        if type(x) is SkipTensors:
            x, skipped = x
            for some in skipped:
                held |= some
        for i, (layer, accepted) in enumerate(zip(self.layers, self.accepted, strict=True)):
            some = {name: value for name, value in named.items() if name in accepted}
            popped = [held.pop(name) for name in skips.pops[i]]
            x = layer(*(x if type(x) is tuple else (x,)), *popped, **some)
            if skips.stashes[i]:
                x = self._stash(i, skips.stashes[i], x, held)
        if target is not None and self.loss is not None:
            return self.loss(x, target)
        return (
            SkipTensors(
                x, tuple({name: held.pop(name) for name in names} for names in skips.leaving)
            )
            if skips.leaving
            else x
        )

    def _stash(self, i: int, names: Sequence[str], y: Any, held: dict[str, Any]) -> Any:
        if type(y) is not tuple or len(y) <= len(names):
            raise TypeError(
                f"layer {self.first + i} stashes {', '.join(names)}: it must return its "
                f"result and {len(names)} more, a tuple; "
                f"it returned a {type(y).__name__}" + (f" of {len(y)}" if type(y) is tuple else "")
            )
        rest = y[: -len(names)]
        held.update(zip(names, y[-len(names) :], strict=True))
        return rest[0] if len(rest) == 1 else rest

    def recompute(self, number: int) -> None:
        """Forward once more, so that `backward` can follow."""
        kept = self._recompute_inputs.pop(number)
        self.recomputing = True
        try:
            with kept.seeds.restored(), random.with_states(kept.dropout), torch.enable_grad():
                y = self.call(kept.x, kept.named, kept.target)
        finally:
            self.recomputing = False
        self._keep(
            number, kept.x, y, [kept.trained and t.is_floating_point() for t in tensors_of(y)]
        )

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the leaves of x, given those of the tensors of y that want one; the weights'
        are added to `.grad`."""
        leaves, roots = self._graphs.pop(number)
        pairs = [
            (root, g)
            for root, g in zip(roots, gradients, strict=True)
            if root is not None and g is not None
        ]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    def inputs(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `backward`, with what can be put off until `weights` put off."""
        assert self._queue is not None
        with self._queue.collecting():
            found = self.backward(number, gradients)
        self._deferred_weight_grads[number] = self._queue.take()
        return found

    def weights(self, number: int) -> None:
        """The weight gradients that `inputs` put off."""
        self._deferred_weight_grads.pop(number).accumulate()

    def _keep(self, number: int, x: Any, y: Any, wanted: list[bool]) -> None:
        leaves = [t for t in tensors_of(x) if t.requires_grad and t.is_leaf] if self.index else []
        roots = [
            get_gradient_edge(t) if t.requires_grad else None
            for t, wants in zip(tensors_of(y), wanted, strict=True)
            if wants
        ]
        self._graphs[number] = SavedGraph(leaves, roots)


def cuda_devices_of(value: Any) -> set[int]:
    """The indices of the CUDA devices that the tensors of a value are on."""
    return {t.device.index for t in tensors_of(value) if t.is_cuda}


def detached(value: Any) -> Any:
    """`value` with every tensor cut off from its graph, a leaf that wants a gradient where the
    tensor did."""
    if type(value) is Tensor:
        return value.detach().requires_grad_(value.requires_grad)
    return tree_map(
        lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, value
    )


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value, in their order."""
    if type(value) is Tensor:  # the usual case
        return [value]
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _wanting_gradient(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        # A result that is an argument as it came must not change what the argument wants.
        return value.detach().requires_grad_()
    return value


def named_arguments(layer: nn.Module) -> frozenset[str]:
    """The named arguments that a layer's forward takes: what its `named_arguments` says, else its
    signature."""
    if (own := getattr(layer, "named_arguments", None)) is not None:
        return frozenset(own)
    several = list(inspect.signature(layer.forward).parameters.values())
    return frozenset(p.name for p in several if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
