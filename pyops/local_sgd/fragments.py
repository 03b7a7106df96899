"""Which layers of a model are exchanged together, and at which step: pure arithmetic.

    layers       embedding  blocks.0  blocks.1  blocks.2  blocks.3  head          fragments = 3
    fragment         0          1         2         0         1      2

    every = 9    step  1 2 3 4 5 6 7 8 9 | 10 11 12 ...                           delay = 2
    begins             . . 0 . . 1 . . 2 |  .  . 0
    is applied         . . . . 0 . . 1 . |  .  2 .

Layers are dealt out in turn, so that each fragment has some of every depth (Streaming DiLoCo,
arXiv:2501.18512, section 2.1: the strided pattern).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["begins_at", "fragment_of_layer", "layer_of", "layers_of"]


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, such as "blocks.3";
    without a number up to the first dot."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return parts[0]


def layers_of(names: Iterable[str]) -> list[str]:
    """The layers of these parameters, in the order in which they first come up."""
    return list(dict.fromkeys(layer_of(name) for name in names))


def fragment_of_layer(layers: Sequence[str], *, fragments: int) -> dict[str, int]:
    """Layer -> the number of its fragment.

    Raises:
        ValueError: There are more fragments than layers.
    """
    if fragments > len(layers):
        raise ValueError(
            f"fragments is {fragments}, but the model has {len(layers)} layers "
            f"({', '.join(layers)}), of which each is exchanged whole; set fragments to "
            f"{len(layers)} or less"
        )
    return {layer: place % fragments for place, layer in enumerate(layers)}


def begins_at(step: int, *, every: int, fragments: int, after: int = 0) -> list[int]:
    """The fragments whose exchange begins at the end of this step.

    Args:
        step: Inner steps so far, 1 after the first.
        every: Steps of a period, in which each fragment begins once.
        fragments: How many there are.
        after: In the first so many steps every fragment begins at each step.
    """
    if step <= after:
        return list(range(fragments))
    place = (step - after - 1) % every + 1
    return [p for p in range(fragments) if every * (p + 1) // fragments == place]
