"""The layouts that there are for so many ranks and rows.

tp    divisors of the heads, up to a node        pp    up to the blocks, with each schedule
cp    with enough tokens for each rank           dp    what is left of the ranks
zero  0 to 3; 0 or 1 with a pipeline             micro-batch: powers of two
recompute: nothing, attention, blocks            codecs of gradients: dp alone, ZeRO 0
offload: of ZeRO 1 and above                     ep: no model here has experts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyops.plan.costs.computing import Case
from pyops.plan.costs.turns import fewest_microbatches
from pyops.plan.layout import CODECS, METHODS, SEVERAL_STAGES, Layout
from pyops.plan.layouts.options import Options

__all__ = ["codec_variants", "layouts", "offloaded"]

STAGES = (2, 3, 4, 6, 8)  # of a rank, with the schedules that have several
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
FEWEST_TOKENS = 2048  # of a rank of cp: with fewer its messages are longer than its products


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _widths(case: Case, ranks: int) -> list[int]:
    """Degrees of tp; where blocks were measured, those for which they were."""
    found, measured = [], case.measured
    for t in _divisors(case.shape.num_heads):
        grouped = case.shape.kv_heads % t == 0 or t % case.shape.kv_heads == 0
        even = case.shape.inner % t == 0
        known = measured is None or measured.has(t)
        if t <= case.cluster.devices_per_node and ranks % t == 0 and grouped and even and known:
            found.append(t)
    return found


def _contexts(case: Case, t: int, ranks: int) -> Iterator[tuple[int, str]]:
    """(cp, method): each rank has two equal pieces of a row, of the order zigzag."""
    yield 1, METHODS[0]
    tokens = case.shape.sequence_length
    for c in _divisors(ranks)[1:]:
        if tokens % (2 * c) or tokens // c < FEWEST_TOKENS:
            continue
        for method in METHODS:
            if method != "ulysses" or case.shape.num_heads // t >= c:
                yield c, method


def _pipelines(case: Case, ranks: int) -> Iterator[tuple[int, str, int]]:
    """(pp, schedule, stages of a rank)."""
    yield 1, "none", 1
    layers = case.shape.num_layers
    for p in _divisors(ranks):
        if not 1 < p <= layers:
            continue
        for schedule in ("1f1b", "zb1p"):
            yield p, schedule, 1
        if 2 * p <= layers:
            yield p, "zbv", 2
        for v in STAGES:
            if v * p <= layers:
                yield p, "interleaved", v


def layouts(case: Case, options: Options, batch: int) -> Iterator[Layout]:
    """All that make a whole grid and share the rows of a batch; without codecs and offload.

    Args:
        case: The model, the cluster, the program.
        options: What may be computed again, and what is fixed.
        batch: Rows of a step.
    """
    ranks = case.cluster.num_devices
    fused = case.software.fused_attention  # whose core has little to compute again
    recomputes = tuple(each for each in options.recompute if not (fused and each == "attention"))
    pipelines = list(_pipelines(case, ranks))
    for t in _widths(case, ranks):
        for c, method in _contexts(case, t, ranks):
            for p, schedule, v in pipelines:
                each = t * c * p
                if ranks % each or batch % (ranks // each):
                    continue
                base = Layout(
                    tp=t,
                    cp=c,
                    cp_method=method,
                    pp=p,
                    dp=ranks // each,
                    schedule=schedule,
                    stages_per_rank=v,
                )
                yield from _variants(base, recomputes, batch // base.dp)


def _variants(base: Layout, recomputes: tuple[str, ...], rows: int) -> Iterator[Layout]:
    stages = (0,) if base.copies == 1 else (0, 1) if base.pp > 1 else (0, 1, 2, 3)
    for b in MICRO_BATCHES:
        if rows % b:
            continue
        cut = replace(base, micro_batch=b, num_microbatches=rows // b)
        if cut.num_microbatches < fewest_microbatches(cut):
            continue
        if cut.schedule in SEVERAL_STAGES and cut.num_microbatches % cut.pp:
            continue
        for zero in stages:
            for recompute in recomputes:
                for sequence in (False, True) if base.tp > 1 else (False,):
                    yield replace(cut, zero=zero, recompute=recompute, sequence_parallel=sequence)


def offloaded(layout: Layout) -> Iterator[Layout]:
    """The same with states in host memory, where a stage of ZeRO has them apart.

    Args:
        layout: Which does not fit beside its states.
    """
    if layout.zero:
        yield replace(layout, offload="cpu")


def codec_variants(layout: Layout) -> Iterator[Layout]:
    """The same with gradients compressed, where whole copies exchange them.

    Args:
        layout: Without a codec.
    """
    if layout.dp == layout.num_ranks > 1 and not layout.zero:
        for codec in CODECS[1:]:
            yield replace(layout, codec=codec)
