"""The linear layers of a model as quantization sees them: matrices [out, in], of which a rank may
hold rows or columns, and the place where their input passes.

    torch.nn.Linear, column- and row-parallel layers     weight [out, in], or [stacked, out, in]
    Conv1D of transformers                               weight [in, out]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn import functional

from pyops.mesh import ALONE
from pyops.models.vocabulary_head import VocabularyHead
from pyops.quantized.formats import Codes
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    Ranks,
    RowParallelLinear,
)

__all__ = [
    "chosen_layers",
    "input_ranks",
    "inputs_of_all",
    "is_conv1d",
    "linear_layers",
    "matrix",
    "output_ranks",
    "own_inputs",
    "place_of_input",
    "stacked",
    "users_of_weights",
]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model by their names, without the head of a vocabulary, which is where
    few bits cost most and whose table is often the embedding's.

    Args:
        model: of pyops.models or anybody's.
    """
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    known = (ColumnParallelLinear, RowParallelLinear, nn.Linear)
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, known) or is_conv1d(module))
        and not isinstance(module, VocabularyHead)
        and module is not head
    }


def chosen_layers(model: nn.Module, only: Sequence[str] | None) -> dict[str, nn.Module]:
    """The linear layers whose names match a pattern.

    Args:
        model: of pyops.models or anybody's.
        only: patterns, ["blocks.*.mlp.*"]; None: all.

    Raises:
        TypeError: for one text in place of a list.
        ValueError: for a pattern that matches no linear layer, or a model without any.
    """
    layers = linear_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer")
    if only is None:
        return layers
    if isinstance(only, str):
        raise TypeError(f"only is {only!r}; give a list of patterns: [{only!r}]")
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(
                f"only: {pattern!r} matches none of {len(layers)} linear layers, such as "
                f"{', '.join(list(layers)[:4])}; write * for any part of a name"
            )
    return {n: m for n, m in layers.items() if any(fnmatchcase(n, p) for p in only)}


def matrix(layer: nn.Module, weight: Tensor | None = None) -> Tensor:
    """The weight as [out, in], a view of what this rank holds; stacked matrices below one another.

    Args:
        layer: one of `linear_layers`.
        weight: what stands in the weight's place; None: the layer's own.
    """
    found = layer._parameters["weight"] if weight is None else weight
    assert found is not None
    if is_conv1d(layer):
        return found.t()
    return found.view(-1, found.shape[-1])


def stacked(layer: nn.Module, codes: Codes) -> Codes:
    """Codes of `matrix(layer)` in the shape of the weight, [.., out, in].

    Args:
        layer: one of `linear_layers`.
        codes: of its matrix.
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    if weight.dim() == 2:
        return codes
    lead, zeros = weight.shape[:-1], codes.zero_points
    return replace(
        codes,
        codes=codes.codes.view(weight.shape),
        scales=codes.scales.view(*lead, *codes.scales.shape[1:]),
        zero_points=None if zeros is None else zeros.view(*lead, *zeros.shape[1:]),
    )


def users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """The names under which the modules of a model have each parameter, by its identity.

    Args:
        model: any.
    """
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(f"{path}.{key}")
    return users


def input_ranks(layer: nn.Module) -> Ranks:
    """The ranks that hold parts of the layer's input, one after the other."""
    return layer.plan.ranks if isinstance(layer, RowParallelLinear) else Ranks.of(ALONE)


def inputs_of_all(layer: nn.Module) -> int:
    """The inputs of the whole layer, without padding.

    Args:
        layer: one of `linear_layers`.
    """
    if isinstance(layer, RowParallelLinear):
        return layer.in_features
    return matrix(layer).shape[1]


def own_inputs(layer: nn.Module, values: Tensor, filled: float) -> Tensor:
    """What belongs to the inputs that this rank holds.

    Args:
        layer: one of `linear_layers`.
        values: [in], a number for each input of the whole layer.
        filled: the number for inputs of padding.
    """
    ranks, width = input_ranks(layer), matrix(layer).shape[1]
    missing = width * ranks.size - len(values)
    return functional.pad(values, (0, missing), value=filled)[width * ranks.rank :][:width]


def output_ranks(layer: nn.Module) -> Ranks:
    """The ranks that hold parts of the layer's output, one after the other."""
    return layer.plan.ranks if isinstance(layer, ColumnParallelLinear) else Ranks.of(ALONE)


def place_of_input(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """The module whose first argument is the layer's input: the layer itself, or the attention that
    gives its input to two layers at once.

    Args:
        model: whose layer it is.
        name: of the layer.
        layer: one of `linear_layers`.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(parent, ParallelAttention) or parent.merged or parent.cross:
        return layer
    return parent if layer in (parent.q, parent.kv) else layer
