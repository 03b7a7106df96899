"""convert: the linear layers of a model become codes, in place.

    report = convert(model, Scheme(weights=Int8(), activations=Int8(per="token")))
    print(report)                              each layer: bytes before and after, error

All that can be refused is refused on every rank before a layer is changed. Layers are converted one
after the other, so that the memory beside the model is that of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather_numbers
from pyops.mesh import ALONE
from pyops.ops.codes.scaled import LONGEST, LONGEST_ASYMMETRIC
from pyops.ops.memory import require_memory
from pyops.quantized.calibration.activation_aware import awq
from pyops.quantized.calibration.block_rounding import RoundedLayer, error_squares, gptq_layers
from pyops.quantized.calibration.inputs import (
    Batch,
    Batches,
    alike,
    check_batches,
    check_model,
)
from pyops.quantized.calibration.ranges import Calibration, InputRange, calibrate
from pyops.quantized.calibration.smoothing import smooth
from pyops.quantized.formats import (
    FP8,
    Codes,
    Format,
    Int4,
    Int8,
    Scheme,
    check_scheme_kind,
    extremes,
    scales_of,
    to_codes,
)
from pyops.quantized.layers import (
    chosen,
    linear_layers,
    placements_of,
    shape_of,
    upright_weight,
)
from pyops.quantized.linear import QuantizedLinear
from pyops.quantized.linear_shape import LinearShape, largest_over_ranks
from pyops.quantized.report import LayerReport, Report
from pyops.tensor_parallel import Ranks, RanksLike

__all__ = ["METHODS", "check_layer", "check_scheme", "convert", "nearest_codes", "replace_layer"]

METHODS = ("nearest", "smooth", "awq", "gptq")


@torch.no_grad()
def convert(
    model: nn.Module,
    scheme: Scheme | None = None,
    *,
    only: Sequence[str] | None = None,
    method: str = "nearest",
    batches: Batches | None = None,
    calibration: Calibration | None = None,
    group: RanksLike = ALONE,
) -> Report:
    """Replace linear layers by `QuantizedLinear`. On several tensor-parallel ranks all make it
    alike.

    Args:
        model: Of pyops.models or anybody's.
        scheme: Formats of weights and activations; None: `Scheme()`, weights of 8 bits alone.
        only: Patterns of the names of layers, ["blocks.*.mlp.*"]; None: all linear layers but a
            vocabulary head and layers that share their weight.
        method: How weights become codes: "nearest" rounds each by itself. With `batches`: "smooth"
            moves far ends of inputs into the weights before (see `smooth`), "awq" scales inputs
            that matter (`awq`), "gptq" rounds column by column (`gptq`).
        batches: Examples, what the model is called with: tensors, or mappings of its arguments. The
            model is in evaluation mode then.
        calibration: How the range of inputs with one scale for all is found from them; None: the
            least and the greatest.
        group: Ranks that have examples of their own; by default this rank alone.

    Returns:
        What was done to each layer.

    Raises:
        ValueError: On every rank, for examples that are wanted and not there, formats without a
            product, a weight that is not finite, groups that do not divide the inputs of a rank,
            sums beyond int32, and what `only` can't name; nothing is changed then.
    """
    scheme = Scheme() if scheme is None else scheme
    check_scheme_kind(scheme)
    static = scheme.activations is not None and scheme.activations.per == "tensor"
    given: list[Batch] = []
    with alike(model, Ranks.of(group)):
        check_scheme(scheme, method)
        layers = chosen(model, only)
        for name, layer in layers.items():
            check_layer(name, layer, scheme)
        if static and batches is None:
            raise ValueError(
                'convert: activations with one scale for all (per="tensor") want batches to find '
                'it with; take Int8(per="token")'
            )
        if static or method != "nearest":
            given = check_batches(batches, "convert")
            check_model(model, layers, "convert")
    options: dict[str, Any] = {"only": list(layers), "group": group}
    rounded: dict[str, RoundedLayer] = {}
    ranges: dict[str, InputRange] = {}
    if method == "smooth":
        smooth(model, given, **options)
    elif method == "awq":
        awq(model, scheme.weights, given, **options)
    elif method == "gptq":
        rounded = gptq_layers(model, scheme.weights, given, **options)
    if static and isinstance(scheme.activations, Int8):
        ranges = calibrate(model, given, format=scheme.activations, how=calibration, **options)
    reports = []
    for name, layer in layers.items():
        found = rounded.get(name)
        codes = nearest_codes(layer, scheme.weights) if found is None else found.codes
        squares = None if found is None else found.squares
        reports.append(replace_layer(model, name, scheme, codes, ranges.get(name), squares))
    return Report(tuple(reports), tuple(linear_layers(model)))


def check_scheme(scheme: Scheme, method: str = "nearest") -> None:
    """Raise ValueError unless there is a product for a scheme.

    Args:
        scheme: Of weights and activations.
        method: How weights become codes.
    """
    weights, activations = scheme.weights, scheme.activations
    if method not in METHODS:
        raise ValueError(f"convert: method is {method!r}; choose one of {', '.join(METHODS)}")
    if isinstance(activations, FP8):
        raise ValueError(
            "convert: there is no product of fp8 inputs here (torch's on the CPU takes a thousand "
            "times as long as fp32); take activations=None, or Int8() for both"
        )
    if activations is None:
        return
    if isinstance(weights, Int4) or weights.group is not None or not weights.symmetric:
        raise ValueError(
            f"convert: beside activations of 8 bits weights are symmetric, with one scale for each "
            f"output; got {weights}. Take Int8(), or activations=None"
        )


def check_layer(name: str, layer: nn.Module, scheme: Scheme, *, finite: bool = True) -> None:
    """Raise ValueError unless a layer can be converted.

    Args:
        name: Of the layer.
        layer: One of `linear_layers`.
        scheme: Of weights and activations.
        finite: Whether its weight has to be: False where other numbers will replace it.
    """
    shape, weight, weights = shape_of(layer), upright_weight(layer), scheme.weights
    require_memory(layer.weight, f"convert: the weight of {name}")  # type: ignore[arg-type]
    if getattr(layer, "adapter", None) is not None:
        raise ValueError(
            f"convert: {name} has an adapter; merge it and take it off, or convert first and give "
            "the converted layer one"
        )
    if not weight.is_floating_point():
        raise ValueError(f"convert: the weight of {name} is {weight.dtype}, not floating-point")
    if weight.dtype.itemsize < 2:
        raise ValueError(f"convert: the weight of {name} is {weight.dtype}; cast it to float32")
    if finite:
        _check_finite(name, {"weight": weight, "bias": layer.bias})  # type: ignore[dict-item]
    _check_groups(name, shape, weight.shape[-1], weights)
    activations = scheme.activations
    if activations is not None:
        longest = LONGEST if activations.symmetric else LONGEST_ASYMMETRIC
        if shape.in_features > longest:
            raise ValueError(
                f"convert: {name} has {shape.in_features} inputs; sums of products of 8 bits fit "
                f"int32 up to {longest}. Leave the layer out with `only`, or take activations=None"
            )


def _check_finite(name: str, tensors: Mapping[str, Tensor | None]) -> None:
    for key, tensor in tensors.items():
        if tensor is None or bool((good := torch.isfinite(tensor)).all()):
            continue
        place = [int(i) for i in (~good).nonzero()[0]]
        raise ValueError(
            f"convert: the {key} of {name} is {tensor[tuple(place)].item()} at {place}; a layer "
            "with such a number computes nothing: load an earlier checkpoint"
        )


def _check_groups(name: str, shape: LinearShape, width: int, weights: Format) -> None:
    group, ranks = weights.group, shape.ranks.size if shape.cut == "row" else 1
    if group is not None and (width % group or shape.in_features % group):
        fitting = [
            g for g in range(2, width + 1, 2) if width % g == 0 and shape.in_features % g == 0
        ]
        said = ", ".join(map(str, fitting[-6:])) or "none: take group=None"
        over = f" over {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"convert: groups of {group} do not divide the {shape.in_features} inputs of "
            f"{name}{over}; groups that do: {said}"
        )
    if isinstance(weights, Int4) and ranks > 1 and width % 2:
        raise ValueError(
            f"convert: a rank has {width} inputs of {name}, of which 4-bit codes can't make whole "
            "bytes; take 8 bits, or another number of ranks"
        )


def nearest_codes(layer: nn.Module, weights: Format) -> Codes:
    """Codes of a layer's weight, each to the nearest; a scale of a row that several ranks hold is
    that of the whole row. Collective where ranks cut the layer by rows.

    Args:
        layer: One of `linear_layers`.
        weights: What the codes are.
    """
    shape, weight = shape_of(layer), upright_weight(layer)
    lowest, highest = extremes(weight, weights)
    if shape.cut == "row" and weights.group is None:
        both = largest_over_ranks(torch.stack([lowest.neg(), highest]), shape.ranks)
        lowest, highest = both[0].neg(), both[1]
    scales, zeros = scales_of(lowest, highest, weights)
    return to_codes(weight, scales, zeros, weights)


def replace_layer(
    model: nn.Module,
    name: str,
    scheme: Scheme,
    codes: Codes,
    input_range: tuple[Tensor, Tensor] | None = None,
    squares: tuple[float, float] | None = None,
) -> LayerReport:
    """Put a `QuantizedLinear` in the place of a layer. Collective where ranks share the layer.

    Args:
        model: Whose layer it is.
        name: Of the layer; not "", which is the model itself.
        scheme: Of weights and activations.
        codes: Of the layer's weight [.., out, in] as this rank has it.
        input_range: Least and greatest input, for activations with one scale for all.
        squares: Of `error_squares`, where the layer no longer has the weight that was rounded.

    Returns:
        What it did.

    Raises:
        ValueError: Where the model is the layer itself.
    """
    if not name:
        raise ValueError("convert: the model is a linear layer itself; put it in a Sequential")
    layer = model.get_submodule(name)
    shape, weight, places = shape_of(layer), upright_weight(layer), placements_of(layer)
    error = _relative_error(squares or error_squares(weight, codes), weight.device, shape)
    bias: nn.Parameter | None = layer.bias  # type: ignore[assignment]
    found = QuantizedLinear(
        shape, scheme, codes=codes, bias=bias, placements=places, input_range=input_range
    )
    found.train(layer.training)
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, found)
    place = places.get("weight")
    whole = tuple(weight.shape) if place is None else place.global_shape
    return LayerReport(
        name,
        whole,
        repr(scheme.weights),
        prod(whole) * weight.element_size(),
        _bytes(found, whole),
        error,
    )


def _relative_error(
    squares: tuple[float, float], device: torch.device, shape: LinearShape
) -> float:
    sums = list(squares)
    if shape.ranks.size > 1:
        rows = gather_numbers(sums, device=device, group=shape.ranks.group)
        sums = [sum(column) for column in zip(*rows, strict=True)]
    return sqrt(sums[0] / sums[1]) if sums[1] else 0.0


def _bytes(layer: QuantizedLinear, whole: tuple[int, ...]) -> int:
    """Of codes, scales and zero points of all ranks together."""
    places = layer.code_placements
    total = 0
    for key in ("codes", "scales", "zero_points"):
        held = getattr(layer, key)
        if held is not None:
            shape = places[key].global_shape if key in places else held.shape
            total += prod(shape) * held.element_size()
    return total
