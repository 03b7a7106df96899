"""The linear layers of a model as quantization sees them: which of them become codes, and what each
is: a matrix [out, in], of which a rank may hold rows or columns, and the place where its input
passes.

pyops.tensor_parallel    ColumnParallelLinear, RowParallelLinear, on any number of ranks; the weight
                         may be several stacked matrices [stacked, out, in]
torch.nn.Linear          of models of anybody's; not its subclasses, whose owners may use the
                         weight itself, as torch.nn.MultiheadAttention does
transformers' Conv1D     whose weight is [in, out]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.models.vocabulary_head import VocabularyHead
from pyops.name_patterns import check_patterns
from pyops.quantized.formats import Codes
from pyops.quantized.linear import QuantizedLinear
from pyops.quantized.linear_shape import LinearShape
from pyops.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    Ranks,
    RowParallelLinear,
)

__all__ = [
    "chosen",
    "input_ranks",
    "inputs_of_all",
    "is_conv1d",
    "is_head",
    "linear_layers",
    "matrix",
    "output_ranks",
    "own_inputs",
    "place_of_input",
    "placements_of",
    "ranks_of",
    "shape_of",
    "stacked",
    "upright_weight",
    "users_of_weights",
]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer whose weight is [in, out].

    Args:
        module: Any.
    """
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can be converted, by their names, in the order of the model.

    Args:
        model: Any.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        or type(module) is nn.Linear
        or is_conv1d(module)
    }


def is_head(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module makes a language model's logits: the loss may need its weight itself.

    Args:
        model: Of pyops or transformers.
        module: Of it.
    """
    get = getattr(model, "get_output_embeddings", None)
    return isinstance(module, VocabularyHead) or (callable(get) and get() is module)


def users_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """The names under which the modules of a model have each parameter, by its identity.

    Args:
        model: Any.
    """
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    return users


def chosen(model: nn.Module, only: Sequence[str] | None) -> dict[str, nn.Module]:
    """The layers that become codes.

    Args:
        model: Any.
        only: Patterns of names as of a shell, of which * goes over points, too; None: all linear
            layers but a vocabulary head and those whose weight another module has, too.

    Raises:
        TypeError: For what is no list of texts, and what is no model.
        ValueError: For a pattern that matches no layer that can be converted, a layer that was
            converted before, a weight that another module has, too, or a model without linear
            layers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; layers are of an nn.Module")
    layers, shared = linear_layers(model), users_of_weights(model)

    def others(name: str, layer: nn.Module) -> list[str]:
        own = f"{name}.weight" if name else "weight"
        return [other for other in shared[id(layer._parameters["weight"])] if other != own]

    if only is None:
        found = {
            name: layer
            for name, layer in layers.items()
            if not is_head(model, layer) and not others(name, layer)
        }
        if not found:
            raise ValueError(f"{type(model).__name__} has no linear layer to convert")
        return found
    check_patterns(only, what="only")
    if not only:
        raise ValueError(f"only is {only!r}, which names no layer; leave it out, or give patterns")
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in layers):
            _explain(model, layers, pattern)
    found = {n: m for n, m in layers.items() if any(fnmatchcase(n, p) for p in only)}
    for name, layer in found.items():
        if is_head(model, layer) or others(name, layer):
            also = ", ".join(others(name, layer)) or "the loss, which wants the weight itself"
            raise ValueError(
                f"only: the weight of {name} is used by {also}, too, and can't become codes; leave "
                "the layer out"
            )
    return found


def _explain(model: nn.Module, layers: dict[str, nn.Module], pattern: str) -> None:
    matched = [(n, m) for n, m in model.named_modules() if n and fnmatchcase(n, pattern)]
    for name, module in matched:
        if isinstance(module, QuantizedLinear):
            raise ValueError(
                f"only: {name} was converted before, to {module.scheme.weights}; load the model "
                "anew to convert it in another way"
            )
    for name, module in matched:
        if next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"only: {pattern!r} matches {name}, a {type(module).__name__}; there are products "
                "of codes for linear layers alone"
            )
    raise ValueError(
        f"only: {pattern!r} matches none of {len(layers)} linear layers, such as "
        f"{', '.join(list(layers)[:4])}; write * for any part of a name"
    )


def shape_of(layer: nn.Module) -> LinearShape:
    """What a linear layer is.

    Args:
        layer: One of `linear_layers`.
    """
    known: Any = layer
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        plan, column = layer.plan, isinstance(layer, ColumnParallelLinear)
        return LinearShape(
            layer.in_features,
            layer.out_features,
            plan.ranks,
            "column" if column else "row",
            plan.sequence_parallel,
            layer.skip_bias,
            known.gather_output if column else known.scatter_input,
        )
    inner, out = known.weight.shape if is_conv1d(layer) else known.weight.shape[::-1]
    return LinearShape(inner, out, Ranks.of(ALONE))


def upright_weight(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as [.., out, in of this rank].

    Args:
        layer: One of `linear_layers`.
    """
    weight: Tensor = layer.weight.detach()  # type: ignore[operator, assignment]
    return weight.t() if is_conv1d(layer) else weight


def matrix(layer: nn.Module, weight: Tensor | None = None) -> Tensor:
    """The weight as [out, in], a view of what this rank holds; stacked matrices below one another.

    Args:
        layer: One of `linear_layers`.
        weight: What stands in the weight's place; None: the layer's own.
    """
    found = layer._parameters["weight"] if weight is None else weight
    assert found is not None
    if is_conv1d(layer):
        return found.t()
    return found.view(-1, found.shape[-1])


def stacked(layer: nn.Module, codes: Codes) -> Codes:
    """Codes of `matrix(layer)` in the shape of the weight, [.., out, in].

    Args:
        layer: One of `linear_layers`.
        codes: Of its matrix.
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


def input_ranks(layer: nn.Module) -> Ranks:
    """The ranks that hold parts of the layer's input, one after the other."""
    return layer.plan.ranks if isinstance(layer, RowParallelLinear) else Ranks.of(ALONE)


def output_ranks(layer: nn.Module) -> Ranks:
    """The ranks that hold parts of the layer's output, one after the other."""
    return layer.plan.ranks if isinstance(layer, ColumnParallelLinear) else Ranks.of(ALONE)


def inputs_of_all(layer: nn.Module) -> int:
    """The inputs of the whole layer, without padding.

    Args:
        layer: One of `linear_layers`.
    """
    if isinstance(layer, RowParallelLinear):
        return layer.in_features
    return matrix(layer).shape[1]


def own_inputs(layer: nn.Module, values: Tensor, filled: float) -> Tensor:
    """What belongs to the inputs that this rank holds.

    Args:
        layer: One of `linear_layers`.
        values: [in], a number for each input of the whole layer.
        filled: The number for inputs of padding.
    """
    ranks, width = input_ranks(layer), matrix(layer).shape[1]
    missing = width * ranks.size - len(values)
    return functional.pad(values, (0, missing), value=filled)[width * ranks.rank :][:width]


def place_of_input(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """The module whose first argument is the layer's input: the layer itself, or the attention that
    gives its input to two layers at once.

    Args:
        model: Whose layer it is.
        name: Of the layer.
        layer: One of `linear_layers`.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(parent, ParallelAttention) or parent.merged or parent.cross:
        return layer
    return parent if layer in (parent.q, parent.kv) else layer


def placements_of(layer: nn.Module) -> dict[str, Placement]:
    """Where weight and bias of this rank stand in the whole ones.

    Args:
        layer: One of `linear_layers`.
    """
    return dict(getattr(layer, "placements", {}))


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks that share the model's layers; one where none are shared.

    Args:
        model: Any.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            return module.plan.ranks
        if isinstance(module, QuantizedLinear) and module.shape.ranks.size > 1:
            return module.shape.ranks
    return Ranks.of(ALONE)
