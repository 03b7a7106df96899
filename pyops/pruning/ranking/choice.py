"""Which parameters are pruned: matrices and convolution kernels, but for embeddings, biases of
positions and the last layer, unless they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from pyops.flat import Placement
from pyops.name_patterns import check_patterns, matching

__all__ = ["Candidate", "candidates_of", "choose", "prunable"]

TABLES = ("Embedding", "RelativeBias")  # in the names of modules whose rows are looked up
HEADS = frozenset(["head", "lm_head", "classifier", "score", "output_layer"])


@dataclass(frozen=True)
class Candidate:
    """A parameter as all ranks speak of it.

    Attributes:
        name: Its first name in the model.
        shape: Of the whole.
        table: Whether a module of embeddings, or of biases of relative positions, has it.
        head: Whether its name says that it is the last layer's, or an embedding is tied to it.
        trained: Whether it requires a gradient and is a floating-point tensor.
    """

    name: str
    shape: tuple[int, ...]
    table: bool
    head: bool
    trained: bool

    @property
    def matrix(self) -> bool:
        """Whether it has two dimensions or more and is no bias: a gated layer has two side by
        side."""
        return len(self.shape) >= 2 and not self.name.endswith("bias")


def candidates_of(model: nn.Module) -> list[Candidate]:
    """All parameters of a model, in its order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")
    placements = Placement.of(model)
    of_tables = {
        id(p)
        for module in model.modules()
        if any(word in type(module).__name__ for word in TABLES)
        for p in module.parameters(recurse=False)
    }
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    found = []
    for name, p in model.named_parameters():
        place = placements.get(name)
        shape = tuple(p.shape) if place is None else tuple(place.global_shape)
        parts = {part for each in names[id(p)] for part in each.split(".")[:-1]}
        table = id(p) in of_tables or bool({"embedding", "embeddings"} & parts)
        head = bool(parts & HEADS) or (table and len(names[id(p)]) > 1)
        found.append(Candidate(name, shape, table, head, p.requires_grad and p.is_floating_point()))
    return found


def choose(candidates: Sequence[Candidate], only: Sequence[str] | None) -> set[str]:
    """The names of those that are pruned.

    Args:
        candidates: Of all ranks, in the order of the model.
        only: Patterns of names of parameters, or of layers, "blocks.*.mlp.up"; None: the default.

    Raises:
        ValueError: A pattern matches nothing, or a frozen or quantized parameter; or nothing is
            left.
    """
    by_name = {each.name: each for each in candidates}
    if only is not None:
        named = matching(list(by_name), _of_parameters(only, by_name), what="only")
        exact = set(only) & set(named)
        chosen = [n for n in named if n in exact or by_name[n].matrix]
        fixed = [n for n in chosen if not by_name[n].trained]
        if fixed:
            raise ValueError(
                f"only: {fixed[0]} is frozen or quantized ({len(fixed)} are); prune first, then "
                "freeze or quantize, or leave it out"
            )
    else:
        matrices = [e for e in candidates if e.matrix and not e.table and e.trained]
        last = {e.name for e in matrices if e.head}
        if not any(e.head for e in candidates) and len(matrices) > 1:
            last = {matrices[-1].name}
        chosen = [e.name for e in matrices if e.name not in last]
    if not chosen:
        raise ValueError(
            "there is no matrix or convolution kernel to prune; name parameters in full in only="
        )
    return set(chosen)


def _of_parameters(only: Sequence[str], names: Collection[str]) -> Sequence[str]:
    """The patterns, where one names a layer that of its weight in its place."""
    check_patterns(only, what="only")

    def matches(text: str) -> bool:
        return any(fnmatchcase(name, text) for name in names)

    return [
        f"{text}.weight" if not matches(text) and matches(f"{text}.weight") else text
        for text in only
    ]


def prunable(model: nn.Module, only: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
    """The parameters of this rank's part of a model that a pattern of N of M inputs is for.

    Args:
        model: Any.
        only: As of `choose`; None: its default, but for the kernels of depthwise convolutions,
            which have one input.

    Raises:
        ValueError, TypeError: As of `choose`.
    """
    candidates = candidates_of(model)
    chosen = choose(candidates, only)
    if only is None:
        chosen -= {e.name for e in candidates if len(e.shape) > 3 and e.shape[1] == 1}
    return {name: p for name, p in model.named_parameters() if name in chosen}
