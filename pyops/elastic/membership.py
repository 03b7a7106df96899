"""choose: how the ranks at hand share a model, when some of them are gone or have come back.

    asked for: tp 2, batch 8      4 ranks    tp 2 x dp 2
                                  3 ranks    tp 2 x dp 1, one rank waits
                                  1 rank     tp 1 x dp 1

A pure function of numbers that all ranks know, so that each finds the same without a word. The
batch of a step is never changed, so neither are the losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pyops.pipeline import balance
from pyops.tensor_parallel.layers.head_groups import check_heads

__all__ = ["Choice", "Grid", "Limits", "choose", "grids"]

GIB = 2**30


@dataclass(frozen=True)
class Grid:
    """tp ranks share each layer, pp such groups hold different layers, and dp such models see
    different sequences.

    Attributes:
        tp: Ranks that share each layer.
        pp: Ranks that hold other layers.
        dp: Models that see other sequences.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")

    @property
    def ranks(self) -> int:
        """That take part."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}"


@dataclass(frozen=True)
class Limits:
    """What a model, its batch and its ranks allow.

    Attributes:
        heads, kv_heads: (0: heads) of attention, which the ranks of tp share.
        costs: Of each layer of the pipeline, embedding and head included, by which it is cut.
        stages: Of each rank of the pipeline.
        folded: Their second half comes back.
        batch: Sequences in a step, of all models together.
        micro_batch, micro_batches: As asked for, 0: not; the latter of pipelines alone.
        most: The largest tp, pp, dp; 0: any.
        memory: Bytes that weights, gradients and states may take on a rank; 0: not known.
        parameters: Numbers in each layer of the pipeline.
        each: Bytes of a parameter's weight, gradient and states.
        zero: Which of them the dp models share out: 1 states, 2 gradients, 3 weights.
    """

    heads: int
    costs: Sequence[float]
    batch: int
    kv_heads: int = 0
    stages: int = 1
    folded: bool = False
    micro_batch: int = 0
    micro_batches: int = 0
    most: tuple[int, int, int] = (0, 0, 0)
    memory: float = 0.0
    parameters: Sequence[int] = ()
    each: tuple[float, float, float] = (4.0, 4.0, 8.0)
    zero: int = 0

    def __post_init__(self) -> None:
        if self.memory and len(self.parameters) != len(self.costs):
            raise ValueError(
                f"memory is {self.memory:g} bytes, but parameters has "
                f"{len(self.parameters)} entries for {len(self.costs)} "
                "layers; give the parameters of each layer, or memory=0"
            )

    def why_not(self, grid: Grid) -> str | None:
        """Why the model can't be shared so, in words; None where it can."""
        return self._of_model(grid.tp, grid.pp) or self._of_batch(grid) or self._of_memory(grid)

    def _of_model(self, tp: int, pp: int) -> str | None:
        for name, degree, most in (("tp", tp, self.most[0]), ("pp", pp, self.most[1])):
            if most and degree > most:
                return f"{name} can't be more than {most} with this configuration"
        try:
            check_heads(self.heads, self.kv_heads or self.heads, tp)
        except ValueError as error:
            return str(error)
        if pp > 1 and pp * self.stages > len(self.costs):
            return f"{len(self.costs)} layers are too few for {pp * self.stages} stages"
        return None

    def _of_batch(self, grid: Grid) -> str | None:
        if self.most[2] and grid.dp > self.most[2]:
            return f"no more than {self.most[2]} are asked for"
        if self.batch % grid.dp:
            return f"{grid.dp} models can't share a batch of {self.batch}"
        share = self.batch // grid.dp
        for count in (self.micro_batch, self.micro_batches if grid.pp > 1 else 0):
            if count and share % count:
                kind = (
                    f"micro-batches of {count}"
                    if count == self.micro_batch
                    else f"{count} micro-batches"
                )
                return (
                    f"{grid.dp} models have {share} sequences each, which can't be cut into {kind}"
                )
        return None

    def _of_memory(self, grid: Grid) -> str | None:
        if self.memory and (taken := self.bytes(grid)) > self.memory:
            return f"{grid} takes {taken / GIB:.3g} GiB of a rank's {self.memory / GIB:.3g}"
        return None

    def bytes(self, grid: Grid) -> float:
        """That weights, gradients and states take on the rank that holds the most."""
        count = grid.pp * (self.stages if grid.pp > 1 else 1)
        bounds = balance(self.costs, num_stages=count)
        held = [0] * grid.pp
        for stage in range(count):
            rank = min(stage, count - 1 - stage) if self.folded and grid.pp > 1 else stage % grid.pp
            held[rank] += sum(self.parameters[bounds[stage] : bounds[stage + 1]])
        weight, gradient, states = self.each
        share = weight / (grid.dp if self.zero > 2 else 1) + gradient / (
            grid.dp if self.zero > 1 else 1
        )
        return max(held) / grid.tp * (share + states / (grid.dp if self.zero else 1))


@dataclass(frozen=True)
class Choice:
    """What `choose` found. Ranks 0 ... grid.ranks - 1 take part, and the last `idle` wait.

    Attributes:
        reason: In words.
    """

    grid: Grid
    idle: int
    reason: str


def grids(ranks: int, limits: Limits, *, idle: bool = True) -> Iterator[Grid]:
    """All that are possible on so many ranks; with idle=False those that leave none out."""
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks // tp + 1):
            if limits._of_model(tp, pp) is not None:
                continue
            for dp in range(1, ranks // (tp * pp) + 1):
                grid = Grid(tp, pp, dp)
                if (idle or grid.ranks == ranks) and limits.why_not(grid) is None:
                    yield grid


def choose(ranks: int, *, wanted: Grid, limits: Limits, idle: bool = True) -> Choice:
    """The best grid for so many ranks.

    Of two grids the better one is found by these rules, in this order:

    1. tp and pp are not larger than asked for: a larger one only where nothing else fits the
       memory.
    2. Where the memory is not known, a rank's part of the model is not larger than asked for, or as
       little larger as can be.
    3. As many ranks as can take part do.
    4. tp and pp are nearest to what was asked for, and of the equally near grids the one with fewer
       stages is taken.

    Args:
        ranks: How many there are.
        wanted: What was asked for; its dp does not matter.
        limits: What the model, its batch and its ranks allow.
        idle: Whether ranks may be left over, which wait.

    Returns:
        The grid, how many ranks wait, and why it is another one than `wanted`.

    Raises:
        ValueError: No grid is possible; the error names the fix.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; it must be a whole number, 1 or more")
    part = wanted.tp * wanted.pp

    def order(grid: Grid) -> tuple[Fraction, int, int, Fraction, int]:
        ratios = [Fraction(grid.tp, wanted.tp), Fraction(grid.pp, wanted.pp)]
        grown = max(ratios[0], Fraction(1)) * max(ratios[1], Fraction(1))
        distance = max(ratios[0], 1 / ratios[0]) * max(ratios[1], 1 / ratios[1])
        lacking = 0 if limits.memory else max(0, part - grid.tp * grid.pp)
        return grown, lacking, ranks - grid.ranks, distance, grid.pp

    found = min(grids(ranks, limits, idle=idle), key=order, default=None)
    if found is None:
        raise ValueError(_nothing(ranks, limits, idle=idle))
    return Choice(found, ranks - found.ranks, _reason(found, ranks, wanted, limits))


def _reason(found: Grid, ranks: int, wanted: Grid, limits: Limits) -> str:
    size, cut = wanted.tp * wanted.pp, f"tp {wanted.tp} x pp {wanted.pp}"
    if (found.tp, found.pp) == (wanted.tp, wanted.pp):
        text = "as asked for"
    elif size > ranks:
        text = f"{cut} takes {size} ranks, and there {'is' if ranks == 1 else 'are'} {ranks}"
    else:
        fitting = [
            g
            for n in range(1, ranks // size + 1)
            if limits.why_not(g := Grid(wanted.tp, wanted.pp, n)) is None
        ]
        lost = None if fitting else limits.why_not(Grid(wanted.tp, wanted.pp, 1))
        text = (
            lost
            or f"{cut} would leave {ranks - max(g.ranks for g in fitting)} of {ranks} ranks waiting"
        )
    if (idle := ranks - found.ranks) == 0:
        return f"{found}: {text}"
    more = Grid(found.tp, found.pp, found.dp + 1)
    why = (
        limits.why_not(more)
        if more.ranks <= ranks
        else f"another model takes {found.tp * found.pp} ranks"
    )
    return f"{found}: {text}; {idle} of {ranks} ranks wait{'s' if idle == 1 else ''}, as {why}"


def _nothing(ranks: int, limits: Limits, *, idle: bool) -> str:
    unlimited = Limits(**{**vars(limits), "memory": 0.0})
    fits = list(grids(ranks, unlimited, idle=idle))
    if limits.memory and fits:
        least = min(fits, key=limits.bytes)
        return (
            f"{limits.why_not(least)}, and no layout of {ranks} ranks takes less; start more "
            "ranks, or allow more"
        )
    why = unlimited.why_not(Grid(dp=1 if idle else ranks))
    return (
        f"{ranks} ranks can't share the model: {why}; start another number of ranks, or "
        "change the batch"
    )
