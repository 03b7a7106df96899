"""Training with quantization in mind: within a context the linear layers of a model compute with
weights and inputs as their codes would give them back; gradients go straight through.

    with aware(model, scheme) as training:
        ...                                       as ever
    codes = training.codes()                      bitwise what the last forward used

(Bengio et al., 2013; learned step sizes: Esser et al., 2020.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pyops.given_numbers import check_number, is_whole
from pyops.mesh import ALONE
from pyops.quantized.calibration.inputs import alike
from pyops.quantized.calibration.ranges import InputRange
from pyops.quantized.conversion import check_scheme, replace_layer
from pyops.quantized.fake_layers import (
    FakeInput,
    FakeWeight,
    first_step,
    is_rounded,
    round_weight,
    unround_weight,
)
from pyops.quantized.formats import FP8, Codes, Int8, Scheme, check_scheme_kind
from pyops.quantized.layers import (
    chosen,
    input_ranks,
    is_conv1d,
    linear_layers,
    matrix,
    place_of_input,
    stacked,
)
from pyops.quantized.linear import QuantizedLinear
from pyops.quantized.report import Report
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["Aware", "aware"]


class Aware:
    """A model in training with quantization in mind; make one by `aware`, as a context. When it
    ends, the model computes in floating point again, with the weights that it has learned.

    Attributes:
        layers: {name: layer} of those that are rounded.
        scheme: to what.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], scheme: Scheme) -> None:
        self.model, self.layers, self.scheme = model, layers, scheme
        self._weights: dict[str, FakeWeight] = {}
        self._inputs: dict[str, FakeInput] = {}
        self._steps: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Aware:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The step sizes, where they are learned: give them to the optimizer as well."""
        yield from self._steps.values()
        yield from (i.step for i in set(self._inputs.values()) if i.step is not None)

    @property
    def frozen(self) -> bool:
        """Whether ranges of static inputs no longer move; True where there are none."""
        static = [i for i in self._inputs.values() if i.format.per == "tensor" and i.step is None]
        return all(each.frozen for each in static)

    def codes(self) -> dict[str, Codes]:
        """The codes of the weights: those of the last forward, unless the weights have moved since.

        Returns:
            {name of a layer: codes of its weight [.., out, in] as this rank has it}.

        Raises:
            RuntimeError: For weights that ZeRO stage 3 has shared out: ask within
                optimizer.whole_parameters(), or after optimizer.close().
        """
        found = {}
        for name, fake in self._weights.items():
            weight = self.layers[name]._parameters["weight"]
            assert weight is not None
            found[name] = stacked(self.layers[name], fake.codes(weight))
        return found

    def input_ranges(self) -> dict[str, InputRange]:
        """The ranges of static inputs by the names of the layers; {} where inputs are rounded token
        by token, or not at all.

        Raises:
            ValueError: before the model has run in training mode.
        """
        static = {n: i for n, i in self._inputs.items() if i.format.per == "tensor"}
        return {name: each.range() for name, each in static.items()}

    def convert(self) -> Report:
        """End it, and replace the layers by `QuantizedLinear` with the codes and the ranges that a
        forward would use now: bitwise those of the last forward, unless weights have moved since.

        Returns:
            What was done to each layer.

        Raises:
            ValueError: For formats without a product, or static inputs that have no range yet.
        """
        with alike(self.model, Ranks.of(ALONE)):
            check_scheme(self.scheme)
            codes, ranges = self.codes(), self.input_ranges()
            for name, found in codes.items():
                if not bool(torch.isfinite(found.scales).all()):
                    raise ValueError(
                        f"convert: the weight of {name} is no longer finite; train with a lower "
                        "rate, or load an earlier checkpoint"
                    )
        self.remove()
        reports = [
            replace_layer(self.model, name, self.scheme, codes[name], ranges.get(name))
            for name in self.layers
        ]
        return Report(tuple(reports), tuple(linear_layers(self.model)))

    def remove(self) -> None:
        """End it: the model computes in floating point again. Its codes can be asked for still."""
        for name in self._weights:
            unround_weight(self.layers[name])
        while self._hooks:
            self._hooks.pop().remove()

    def _round_weight(self, name: str, layer: nn.Module, learn_steps: bool) -> None:
        if learn_steps:
            self._steps[name] = nn.Parameter(first_step(matrix(layer), self.scheme.weights))
        fake = FakeWeight(
            self.scheme.weights,
            transposed=is_conv1d(layer),
            ranks=input_ranks(layer),
            step=self._steps.get(name),
        )
        self._weights[name] = fake
        round_weight(layer, fake)

    def _round_inputs(self, format: Int8, limit: int, learn_steps: bool, group: Ranks) -> None:
        at: dict[int, FakeInput] = {}
        for name, layer in self.layers.items():
            place = place_of_input(self.model, name, layer)
            if id(place) not in at:
                fake = FakeInput(format, ranks=input_ranks(layer), group=group)
                fake.limit = limit
                if learn_steps and format.per == "tensor":
                    fake.step = nn.Parameter(matrix(layer).new_ones((), dtype=torch.float32))
                at[id(place)] = fake
                self._hooks.append(place.register_forward_pre_hook(partial(_before, fake)))
            self._inputs[name] = at[id(place)]


def _before(fake: FakeInput, place: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    fake.train(place.training)
    return (fake(args[0]), *args[1:])


def aware(
    model: nn.Module,
    scheme: Scheme,
    *,
    only: Sequence[str] | None = None,
    learn_steps: bool = False,
    steps: int | None = None,
    freeze_after: float = 0.8,
    group: RanksLike = ALONE,
) -> Aware:
    """Train a model with quantization in mind; to be used as a context.

    Args:
        model: of pyops.models or anybody's, before an optimizer's states are sharded.
        scheme: what weights and inputs are rounded to, integers. Scales of the weights are those of
            the weights as they are in each forward.
        only: patterns of the names of layers; None: all linear layers but the head and those whose
            weight another module has, too.
        learn_steps: the scales of weights, and of static inputs, are learned (LSQ): give
            `parameters()` of what is returned to the optimizer as well.
        steps: training forwards of the whole run; needed for static inputs (`per="tensor"`).
        freeze_after: the part of `steps` after which the ranges of static inputs stay as they are,
            so that the model learns with the scales that it will keep.
        group: ranks that train on tokens of their own; by default this rank alone.

    Raises:
        ValueError: for fp8, static inputs without `steps`, learned steps of asymmetric formats or
            of layers whose inputs several ranks hold, a model that is rounded already, a weight
            that another module has, too; nothing is changed then.
    """
    ranks = Ranks.of(group)
    check_scheme_kind(scheme)
    static = scheme.activations is not None and scheme.activations.per == "tensor"
    with alike(model, ranks):
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                raise ValueError(
                    f"aware: {name} was converted before; train the model before it is converted"
                )
            if is_rounded(module) and (only is None or any(fnmatchcase(name, p) for p in only)):
                raise ValueError(f"aware: {name} is rounded already; end that context first")
        layers = chosen(model, only)
        _check(layers, scheme, learn_steps)
        check_number(
            "freeze_after",
            freeze_after,
            lambda v: 0 <= v <= 1,
            "it is a part of all steps, 0 to 1",
        )
        if steps is not None and not is_whole(steps):
            raise ValueError(f"aware: steps is {steps!r}; give a whole number")
        if static and not learn_steps and (steps is None or steps < 1):
            raise ValueError(
                f'aware: steps is {steps}; inputs of per="tensor" want the number of training '
                "forwards, after a part of which (freeze_after) their ranges stay"
            )
    made = Aware(model, layers, scheme)
    for name, layer in layers.items():
        made._round_weight(name, layer, learn_steps)
    if isinstance(scheme.activations, Int8):
        limit = max(1, math.ceil(freeze_after * (steps or 0)))
        made._round_inputs(scheme.activations, limit, learn_steps, ranks)
    return made


def _check(layers: dict[str, nn.Module], scheme: Scheme, learn_steps: bool) -> None:
    for format in (scheme.weights, scheme.activations):
        if isinstance(format, FP8):
            raise ValueError(f"aware rounds to whole numbers; got {format}. Take Int8, Int4, IntN")
        if learn_steps and format is not None and not format.symmetric:
            raise ValueError(f"aware: learned steps are of symmetric formats; got {format}")
    group = scheme.weights.group
    for name, layer in layers.items():
        if not bool(torch.isfinite(matrix(layer)).all()):
            raise ValueError(
                f"aware: the weight of {name} has a number that is not finite; load an earlier "
                "checkpoint"
            )
        width = matrix(layer).shape[1]
        if group and width % group:
            fitting = ", ".join(str(g) for g in range(2, width + 1, 2) if width % g == 0)
            raise ValueError(
                f"aware: {name} has {width} inputs on a rank, which groups of {group} do not "
                f"divide; these do: {fitting or 'none'}"
            )
        if learn_steps and input_ranks(layer).size > 1:
            raise ValueError(
                f"aware: {name} has its inputs on {input_ranks(layer).size} ranks; learned steps "
                "are for layers that a rank holds whole rows of"
            )
