"""Why not another strategy: the best layout of each, beside the one that was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyops.plan.clusters import GIB
from pyops.plan.layout import CODECS, Layout
from pyops.plan.layouts.pricing import Priced

__all__ = ["Strategies", "reasons", "strategies_of"]

ALIKE = 0.01  # of the time

# By whether there are ranks of tp, of pp and of dp.
STRATEGIES = {
    (False, False, False): "one rank",
    (False, False, True): "one rank a copy, whole (dp)",
    (True, False, False): "tp alone",
    (False, True, False): "pp alone",
    (True, False, True): "tp and dp",
    (False, True, True): "pp and dp",
    (True, True, False): "tp and pp",
    (True, True, True): "tp, pp and dp",
}
ONLY_COPIES = ("one rank a copy, whole (dp)", *(f"ZeRO {stage} alone" for stage in (1, 2, 3)))
AXES = (*ONLY_COPIES, *(name for name in STRATEGIES.values() if name not in ONLY_COPIES))
CONTEXT = "context parallelism (cp)"
OFFLOADED = "states in host memory"
SCHEDULES = ("1f1b", "zb1p", "zbv", "interleaved")
RECOMPUTED = {"none": "nothing computed again", "block": "blocks computed again"}
CODED = {codec: f"gradients as {codec}" for codec in CODECS[1:]}
NEVER = (
    ("experts (ep)", "the model has none, and pyops has no layer of experts"),
    ("fp8", "pyops computes no products in fp8: fp32, bf16 or fp16"),
)


def _axes(layout: Layout) -> str:
    if layout.cp > 1:
        return CONTEXT
    if layout.tp == layout.pp == 1 < layout.dp:
        return ONLY_COPIES[layout.zero]
    return STRATEGIES[layout.tp > 1, layout.pp > 1, layout.dp > 1]


def strategies_of(layout: Layout) -> Iterator[str]:
    """The names of all strategies that a layout belongs to.

    Args:
        layout: Any.
    """
    if layout.codec != "none":
        yield CODED[layout.codec]
        return
    if layout.offload != "none":
        yield OFFLOADED
        return
    yield _axes(layout)
    if layout.pp > 1:
        yield f"schedule {layout.schedule}"
    if layout.recompute in RECOMPUTED:
        yield RECOMPUTED[layout.recompute]


class Strategies:
    """The best layout of each strategy: the fastest that fits, or that which takes least.

    Attributes:
        best: {name: layout}.
    """

    def __init__(self) -> None:
        self.best: dict[str, tuple[Priced, bool]] = {}

    def keep(self, priced: Priced, *, fits: bool) -> None:
        """Look at one more layout.

        Args:
            priced: The layout.
            fits: Whether its memory does.
        """
        for name in strategies_of(priced.layout):
            best, fitted = self.best.get(name, (priced, False))
            better = (
                fits and (not fitted or priced.seconds < best.seconds)
                if fitted or fits
                else priced.memory.total < best.memory.total
            )
            if better or name not in self.best:
                self.best[name] = (priced, fits)


TERMS = {
    "recomputed": "what is computed again",
    "tensor_messages": "messages of tp",
    "context_messages": "messages of cp",
    "pipeline_messages": "messages of pp",
    "idle": "the bubble of the pipeline",
    "data_messages": "messages of dp",
    "optimizer": "the optimizer's step",
    "products": "products of the slowest rank",
    "attention": "attention",
    "between": "what lies between the products",
    "host": "launching kernels",
    "stragglers": "stragglers",
    "crowding": "turns on the processors",
}


def _asked(best: Layout, there_are: Mapping[str, object]) -> list[str]:
    """The names of what the found layout is compared with."""
    names = [name for name in AXES if (name == "one rank") == (best.num_ranks == 1)]
    names += [name for name in (CONTEXT, OFFLOADED) if name in there_are]
    if best.pp > 1:
        names += [f"schedule {name}" for name in SCHEDULES]
    names += RECOMPUTED.values()
    if best.codec == "none":
        names += [name for name in CODED.values() if name in there_are]
    return [name for name in names if name not in set(strategies_of(best))]


def reasons(strategies: Strategies, best: Priced, room: float) -> Iterator[tuple[str, str]]:
    """Why each other strategy is not the one that was found.

    Args:
        strategies: The best of each.
        best: What was found.
        room: Bytes that may be used.
    """
    for name in _asked(best.layout, strategies.best):
        if name not in strategies.best:
            yield name, "makes no grid of these ranks, heads, blocks and rows"
            continue
        other, fits = strategies.best[name]
        yield name, _reason(other, best, room) if fits else _too_large(other, room)
    yield from NEVER


def _too_large(other: Priced, room: float) -> str:
    over = (other.memory.total - room) / GIB
    if over <= 0:
        return f"{other.layout}, ZeRO {other.layout.zero}: the host's memory is too small"
    terms = ("parameters", "gradients", "states", "activations", "logits")
    most = max(terms, key=lambda term: float(getattr(other.memory, term)))
    return (
        f"{other.memory.gib:.1f} GiB at the least, {over:.1f} more than there are; most of it "
        f"{most}"
    )


def _reason(other: Priced, best: Priced, room: float) -> str:
    differences = {term: getattr(other.time, term) - getattr(best.time, term) for term in TERMS}
    slower = other.seconds / best.seconds - 1.0
    layout = other.layout
    what = f"{layout}, ZeRO {layout.zero}, {other.memory.gib:.1f} GiB"
    if layout.cp > 1:
        what = f"{layout.cp_method}: {what}"
    if slower >= ALIKE:
        worst = max(differences, key=lambda term: differences[term])
        return f"{slower:.0%} slower ({what}): {TERMS[worst]} {differences[worst]:+.3g} s"
    if layout.codec == "none" or slower > -ALIKE:
        return f"as fast ({what})"
    return (
        f"{-slower:.0%} faster ({what}), but rounds gradients: ask for it with --codec "
        f"{layout.codec}"
    )
