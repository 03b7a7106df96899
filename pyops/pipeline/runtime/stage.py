"""Stage: neighbouring layers on one device, and what they keep of every micro-batch between its
forward and its backward.

    forward(m, x)          x -> layers -> y       keeps the leaves of x and where y's graph begins
    backward(m, g)         gradients of y -> gradients of the leaves of x, and of the weights
    backward_input(m, g)   the gradients of x alone; those of the weights wait for
    backward_weight(m)     their deferred products
    recompute(m)           forward a second time, where the first kept x alone; same random numbers

Gradients are those of torch.autograd, micro-batch by micro-batch in the order of the calls: added
to what is in `.grad`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map

from pyops import random
from pyops.deferred import Deferred, linears
from pyops.pipeline.runtime.skips import SkipEdges, SkipTensors, StageSkips, stage_skips
from pyops.random import RandomStates

__all__ = ["Loss", "Stage", "detached", "named_arguments", "tensors_of"]

Loss: TypeAlias = Callable[[Any, Any], Tensor]


class SavedGraph(NamedTuple):
    """What a backward needs.

    Attributes:
        leaves: The tensors of x that get gradients.
        roots: Where the graph of each tensor of y begins, None for one without a graph.
    """

    leaves: list[Tensor]
    roots: list[Any]


class RecomputeInputs(NamedTuple):
    """What a second forward needs: the arguments, the random states of the first, and whether its
    results require gradients."""

    x: Any
    named: dict[str, Any]
    target: Any
    dropout_states: Any
    random_states: RandomStates
    requires_grad: bool


class Stage:
    """Stage `index` of the pipeline: `layers`, of which the first is the model's number `first`.

    Layers are called one after the other with the result of the layer before, a tuple as several
    arguments; named arguments go to the layers whose forward names them.

    Args:
        index: The number of the stage.
        layers: Its layers.
        first: The number of its first layer in the model.
        loss: On the last stage: (result of the last layer, target) -> a scalar tensor.
        edges: The names of the values that skip stages, for each edge of the pipeline. Where this
            stage has some, x and y are `SkipTensors`.
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

    def defer_weight_grads(self) -> None:
        """Let the weight gradients of linear layers be computed apart from those of their input."""
        for layer in self.layers:
            linears(layer)
        self._queue = Deferred(p for layer in self.layers for p in layer.parameters())

    @property
    def num_in_flight(self) -> int:
        """How many micro-batches are between forward and backward."""
        return len(self._graphs.keys() | self._recompute_inputs.keys())

    def clear(self) -> None:
        """Let go of everything that is kept for a backward."""
        self._graphs.clear()
        self._recompute_inputs.clear()
        self._deferred_weight_grads.clear()

    def close(self) -> None:
        """Let go of what is kept, and compute weight gradients with those of the input again."""
        self.clear()
        if self._queue is not None:
            self._queue.release()

    def forward(
        self, number: int, x: Any, named: dict[str, Any], target: Any, *, recompute: bool = False
    ) -> Any:
        """The layers' result for micro-batch `number`; on the last stage its loss.

        Args:
            number: The micro-batch.
            x: The result of the stage before, or the batch.
            named: Named arguments of the layers.
            target: The second argument of the loss, on the last stage.
            recompute: Keep x alone; `recompute` follows before `backward`.
        """
        if not recompute:
            y = self.call(x, named, target)
            self._keep(number, x, y, [t.requires_grad for t in tensors_of(y)])
            return y
        requires_grad = any(t.requires_grad for t in tensors_of(x)) or any(
            p.requires_grad for layer in self.layers for p in layer.parameters()
        )
        dropout = [each for layer in self.layers for each in random.states_of(layer)]
        self._recompute_inputs[number] = RecomputeInputs(
            x, named, target, dropout, RandomStates(cuda_devices_of(x)), requires_grad
        )
        with torch.no_grad():
            y = self.call(x, named, target)
        return tree_map(_requiring_grad, y) if requires_grad else y

    def call(self, x: Any, named: dict[str, Any], target: Any) -> Any:
        """The layers, and the loss where there is a target."""
        if self._works_in_place:
            # x may be a leaf, be kept for a second forward, or be the result of another stage of
            # this process; a layer that works in place gets a copy.
            x = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)
        if self.skips is not None:
            return self._call_with_skips(self.skips, x, named, target)
        for layer, accepted in zip(self.layers, self.accepted, strict=True):
            own = (
                {name: value for name, value in named.items() if name in accepted}
                if named
                else named
            )
            x = layer(*x, **own) if type(x) is tuple else layer(x, **own)
        return self.loss(x, target) if self.loss is not None and target is not None else x

    def _call_with_skips(
        self, skips: StageSkips, x: Any, named: dict[str, Any], target: Any
    ) -> Any:
        held: dict[str, Any] = {}
        if type(x) is SkipTensors:
            x, skipped = x
            for values in skipped:
                held |= values
        for i, (layer, accepted) in enumerate(zip(self.layers, self.accepted, strict=True)):
            own = {name: value for name, value in named.items() if name in accepted}
            popped = [held.pop(name) for name in skips.pops[i]]
            x = layer(*(x if type(x) is tuple else (x,)), *popped, **own)
            if skips.stashes[i]:
                x = self._stash(i, skips.stashes[i], x, held)
        if target is not None and self.loss is not None:
            return self.loss(x, target)
        if not skips.leaving:
            return x
        return SkipTensors(
            x, tuple({name: held.pop(name) for name in names} for names in skips.leaving)
        )

    def _stash(self, i: int, names: Sequence[str], y: Any, held: dict[str, Any]) -> Any:
        """The result of layer i without the values that it stashes, which go into `held`."""
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
            with (
                kept.random_states.restored(),
                random.with_states(kept.dropout_states),
                torch.enable_grad(),
            ):
                y = self.call(kept.x, kept.named, kept.target)
        finally:
            self.recomputing = False
        self._keep(
            number,
            kept.x,
            y,
            [kept.requires_grad and t.is_floating_point() for t in tensors_of(y)],
        )

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Backward of micro-batch `number`; the gradients of the weights are added to `.grad`.

        Args:
            number: The micro-batch.
            gradients: Of the tensors of y that require one, in their order.

        Returns:
            The gradients of the leaves of x.
        """
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

    def backward_input(
        self, number: int, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """As `backward`, but weight gradients that can be deferred wait for `backward_weight`."""
        assert self._queue is not None
        with self._queue.collecting():
            found = self.backward(number, gradients)
        self._deferred_weight_grads[number] = self._queue.take()
        return found

    def backward_weight(self, number: int) -> None:
        """The weight gradients that `backward_input` deferred."""
        self._deferred_weight_grads.pop(number).accumulate()

    def deferred_bytes(self, number: int) -> int:
        """Bytes that are kept for the deferred weight gradients of a micro-batch."""
        return int(self._deferred_weight_grads[number].nbytes)

    def _keep(self, number: int, x: Any, y: Any, selected: list[bool]) -> None:
        """Keep what `backward` needs. selected: the tensors of y for which a gradient comes."""
        leaves = [t for t in tensors_of(x) if t.requires_grad and t.is_leaf] if self.index else []
        # Gradient edges, not the tensors: y itself may be freed once it has been sent.
        roots = [
            get_gradient_edge(t) if t.requires_grad else None
            for t, is_selected in zip(tensors_of(y), selected, strict=True)
            if is_selected
        ]
        self._graphs[number] = SavedGraph(leaves, roots)


def cuda_devices_of(value: Any) -> set[int]:
    """The indices of the CUDA devices that the tensors of a value are on."""
    return {t.device.index for t in tensors_of(value) if t.is_cuda}


def detached(value: Any) -> Any:
    """`value` with every tensor cut off from its graph: a leaf, which requires a gradient where the
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


def _requiring_grad(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        # A layer may return its argument unchanged; requires_grad of the caller's tensor stays.
        return value.detach().requires_grad_()
    return value


def named_arguments(layer: nn.Module) -> frozenset[str]:
    """The names of arguments that a layer's forward takes: its attribute `named_arguments`, else
    those of the signature."""
    if (own := getattr(layer, "named_arguments", None)) is not None:
        return frozenset(own)
    parameters = list(inspect.signature(layer.forward).parameters.values())
    return frozenset(
        p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
