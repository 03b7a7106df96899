"""Which parameters are pruned: matrices and convolution kernels, but for embeddings and the last
layer, unless they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pyops.flat import Placement
from pyops.name_patterns import matching

__all__ = ["Candidate", "candidates_of", "choose"]

HEADS = frozenset(["head", "lm_head", "classifier", "score", "output_layer"])


@dataclass(frozen=True)
class Candidate:
    """A parameter as all ranks speak of it.

    Attributes:
        name: Its first name in the model.
        shape: Of the whole.
        embedding: Whether a module of embeddings has it.
        head: Whether its name says that it is the last layer's, or an embedding is tied to it.
        trained: Whether it requires a gradient and is a floating-point tensor.
    """

    name: str
    shape: tuple[int, ...]
    embedding: bool
    head: bool
    trained: bool


def candidates_of(model: nn.Module) -> list[Candidate]:
    """All parameters of a model, in its order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module")
    placements = Placement.of(model)
    of_embeddings = {
        id(p)
        for module in model.modules()
        if "Embedding" in type(module).__name__
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
        embedding = id(p) in of_embeddings or bool({"embedding", "embeddings"} & parts)
        head = bool(parts & HEADS) or (embedding and len(names[id(p)]) > 1)
        found.append(
            Candidate(name, shape, embedding, head, p.requires_grad and p.is_floating_point())
        )
    return found


def choose(candidates: Sequence[Candidate], only: Sequence[str] | None) -> set[str]:
    """The names of those that are pruned.

    Args:
        candidates: Of all ranks, in the order of the model.
        only: Patterns, or None for the default.

    Raises:
        ValueError: A pattern matches nothing, or a frozen or quantized parameter; or nothing is
            left.
    """
    by_name = {each.name: each for each in candidates}
    if only is not None:
        named = matching(list(by_name), only, what="only")
        exact = set(only) & set(named)
        chosen = [n for n in named if n in exact or len(by_name[n].shape) >= 2]
        fixed = [n for n in chosen if not by_name[n].trained]
        if fixed:
            raise ValueError(
                f"only: {fixed[0]} is frozen or quantized ({len(fixed)} are); prune first, then "
                "freeze or quantize, or leave it out"
            )
    else:
        matrices = [e for e in candidates if len(e.shape) >= 2 and not e.embedding and e.trained]
        last = {e.name for e in matrices if e.head}
        if not any(e.head for e in candidates) and len(matrices) > 1:
            last = {matrices[-1].name}
        chosen = [e.name for e in matrices if e.name not in last]
    if not chosen:
        raise ValueError(
            "there is no matrix or convolution kernel to prune; name parameters in full in only="
        )
    return set(chosen)
