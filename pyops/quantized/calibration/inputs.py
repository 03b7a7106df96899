"""The inputs of linear layers while a model runs over examples.

model(batch) --> layer 0 --> layer 1 --> layer 2 --> ...
                    |           |
                see(name, x)  see(name, x)   and, where nothing more is wanted, no further
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pyops.comm.agreement import ranks_agree
from pyops.mesh import ALONE
from pyops.quantized.layers import place_of_input
from pyops.tensor_parallel import Ranks

__all__ = [
    "Batch",
    "Batches",
    "alike",
    "check_batches",
    "check_model",
    "order_of",
    "run",
    "watching",
]

Batch: TypeAlias = Tensor | Mapping[str, Any]
"""What a model is called with: a tensor, or a mapping of its arguments."""
Batches: TypeAlias = Iterable[Batch]
See: TypeAlias = Callable[[str, Tensor], None]


class _Enough(Exception):
    """The layers that are watched have all been called."""


def check_model(model: nn.Module, layers: Mapping[str, nn.Module], what: str) -> None:
    """Raise unless examples can be run through the model.

    Args:
        model: whose layers they are.
        layers: those that are watched.
        what: the function, for the message.

    Raises:
        ValueError: for a model in training mode, or one whose ranks hold parts of the tokens.
    """
    if model.training:
        raise ValueError(
            f"{what}: the model is in training mode, so dropout would change what its layers are "
            "given; call model.eval() first"
        )
    for name, layer in layers.items():
        plan = getattr(layer, "plan", None)
        if plan is not None and plan.sequence_parallel:
            raise ValueError(
                f"{what}: {name} is sequence parallel: a rank sees its part of the tokens; make "
                "the model with sequence_parallel=False to calibrate it"
            )


def check_batches(batches: Batches | None, what: str) -> list[Batch]:
    """The batches as a list.

    Args:
        batches: examples.
        what: what needs them, for the message.

    Raises:
        ValueError: for none, and for examples without a number.
        TypeError: for one example in place of a list of them, and for what is no example.
    """
    one = isinstance(batches, Tensor | Mapping | str)
    if batches is not None and (one or not isinstance(batches, Iterable)):
        raise TypeError(
            f"{what}: batches is a {type(batches).__name__}; give a list of what the model is "
            "called with, [x] for one batch"
        )
    found = list(batches) if batches is not None else []
    if not found:
        raise ValueError(
            f"{what} wants examples; give batches=[...], what the model is called with"
        )
    for number, batch in enumerate(found):
        if not isinstance(batch, Tensor | Mapping):
            raise TypeError(
                f"{what}: batch {number} is a {type(batch).__name__}; give a tensor, or a mapping "
                "of the model's arguments"
            )
    given = [x for b in found for x in ([b] if isinstance(b, Tensor) else b.values())]
    tensors = [x for x in given if isinstance(x, Tensor)]
    if tensors and not any(x.numel() for x in tensors):
        raise ValueError(f"{what}: no example has a number in it; give examples that have")
    return found


@contextmanager
def alike(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """All ranks leave the block, or all raise: those that share the model's layers, and those that
    share out the examples. Collective; the block must communicate nothing.

    Args:
        model: whose layers ranks may share.
        ranks: that have examples of their own.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    modules = model.modules() if isinstance(model, nn.Module) else ()
    plans = (getattr(module, "plan", None) for module in modules)
    shared = next((plan.ranks for plan in plans if plan is not None), Ranks.of(ALONE))
    for each in (shared, ranks):
        try:
            with ranks_agree(each.group):
                if error is not None:
                    raise error
        except Exception as found:
            error = found
    if error is not None:
        raise error


@contextmanager
def watching(model: nn.Module, layers: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Within the block each call of a layer calls see(name, x) before.

    Args:
        model: whose layers they are.
        layers: by name.
        see: is given the name and the input [tokens, in], as this rank has it.
    """
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def given(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                x = args[0]
                see(name, x.detach().reshape(-1, x.shape[-1]))

            place = place_of_input(model, name, layer)
            hooks.callback(place.register_forward_pre_hook(given).remove)
        yield


@torch.no_grad()
def run(
    model: nn.Module, batches: Iterable[Batch], layers: Mapping[str, nn.Module], see: See
) -> None:
    """Run the model over batches and show the inputs of layers; a run ends as soon as each of them
    has been called.

    Args:
        model: in evaluation mode.
        batches: examples.
        layers: by name; each is called once in a run.
        see: see `watching`.
    """
    missing: set[str] = set()

    def seen(name: str, x: Tensor) -> None:
        see(name, x)
        missing.discard(name)
        if not missing:
            raise _Enough

    with watching(model, layers, seen):
        for batch in batches:
            missing = set(layers)
            try:
                model(batch) if isinstance(batch, Tensor) else model(**batch)
            except _Enough:
                continue
            raise ValueError(
                f"{type(model).__name__} did not call {', '.join(sorted(missing))}; leave them out "
                "with only=[...]"
            )


def order_of(model: nn.Module, batch: Batch, layers: Mapping[str, nn.Module]) -> list[str]:
    """The names of the layers in the order in which the model calls them.

    Args:
        model: in evaluation mode.
        batch: an example.
        layers: by name.
    """
    order: list[str] = []
    run(model, [batch], layers, lambda name, _: order.append(name) if name not in order else None)
    return order
