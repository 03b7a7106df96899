"""The linear layers of a model: which of them are to be converted, and what each is.

pyops.tensor_parallel    ColumnParallelLinear, RowParallelLinear, on any number of ranks
torch.nn.Linear          of models of anybody's; not its subclasses, whose owners may use the
                         weight itself, as torch.nn.MultiheadAttention does
transformers' Conv1D     whose weight is [in, out]
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.models.vocabulary_head import VocabularyHead
from pyops.quantized.linear import QuantizedLinear
from pyops.quantized.linear_shape import LinearShape
from pyops.tensor_parallel import ColumnParallelLinear, Ranks, RowParallelLinear

__all__ = [
    "chosen",
    "is_conv1d",
    "is_head",
    "linear_layers",
    "placements_of",
    "ranks_of",
    "shape_of",
    "upright_weight",
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
    """Whether a module makes a language model's logits: the loss may want its weight itself.

    Args:
        model: Of pyops or transformers.
        module: Of it.
    """
    get = getattr(model, "get_output_embeddings", None)
    return isinstance(module, VocabularyHead) or (callable(get) and get() is module)


def _shared_weights(model: nn.Module) -> dict[int, list[str]]:
    """Names under which each parameter is found."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def chosen(model: nn.Module, only: Sequence[str] | None) -> dict[str, nn.Module]:
    """The layers to convert.

    Args:
        model: Any.
        only: Patterns of names as of a shell, of which * goes over points, too; None: all linear
            layers but a vocabulary head and those whose weight another module has, too.

    Raises:
        TypeError: For one text in place of a list of them.
        ValueError: For a pattern that matches no layer that can be converted, a layer that was
            converted before, a weight that another module has, too, or a model without linear
            layers.
    """
    layers, shared = linear_layers(model), _shared_weights(model)

    def others(name: str, layer: nn.Module) -> list[str]:
        own = f"{name}.weight" if name else "weight"
        return [other for other in shared[id(layer.weight)] if other != own]

    if only is None:
        found = {
            name: layer
            for name, layer in layers.items()
            if not is_head(model, layer) and not others(name, layer)
        }
        if not found:
            raise ValueError(f"{type(model).__name__} has no linear layer to convert")
        return found
    if isinstance(only, str):
        raise TypeError(f"only is {only!r}; give a list of patterns: [{only!r}]")
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
